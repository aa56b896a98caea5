"""``--model`` with a model that is wrong as a program: told once, before anything is checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fixtures.own_model.factory import UserModelError, load
from fixtures.own_model.trial import require_trainable, told
from meta_tests.running import ROOT, Repository, copy_repository

MODELS = "meta_tests.broken_models"

BROKEN = (
    ("vector_loss", r"the loss is of shape \(4, 2\)"),
    ("detached_loss", "the loss does not depend on any parameter"),
    ("zero_loss", "every gradient is exactly 0, so that every check would hold"),
    ("nan_weight", "weight is NaN in 1 of 6 elements already, as the factory returns it"),
    ("nan_loss", "loss is NaN in 1 of 1 elements in one plain step, in fp32 on the CPU"),
    ("sparse_gradient", "the gradient of 0.weight is sparse; .* sparse=False"),
    ("leaves_in_the_factory", "the factory raised SystemExit: usage: train.py --data DIR"),
    ("leaves_in_the_loss", r"raised SystemExit: no tokens left \(.*broken_models.py, line "),
    ("wrong_width", r"raised RuntimeError: mat1 and mat2 .*broken_models.py, line .* in <lambda>"),
)


@pytest.mark.parametrize(("factory", "text"), BROKEN, ids=[b[0] for b in BROKEN])
def test_a_broken_program_is_refused_before_the_checks(factory: str, text: str) -> None:
    with pytest.raises(UserModelError, match=f"--model {MODELS}:{factory}: .*{text}"):
        try_step(f"{MODELS}:{factory}")


def test_a_sound_model_is_not_refused() -> None:
    try_step("meta_tests.own_models:all_kinds")


def try_step(spec: str) -> None:
    require_trainable(spec, load(spec))


def test_an_exception_is_told_without_the_tensors_that_it_prints() -> None:
    text = told(RuntimeError("got\n" + "0.125, " * 100_000))
    assert text.startswith("RuntimeError: got 0.125, 0.125")
    assert len(text) < 400


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = copy_repository(tmp_path_factory.mktemp("broken"), "model", "model_ranks")
    shutil.copy(ROOT / "meta_tests" / "broken_models.py", made.root / "broken_models.py")
    (made.root / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    return made


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("broken_models:zero_loss", "ERROR: --model broken_models:zero_loss: every gradient is"),
        ("leaves:factory", "ERROR: --model leaves:factory: importing leaves raised SystemExit: 3"),
    ],
)
def test_it_ends_the_run_once_and_is_no_regression(
    repository: Repository, spec: str, text: str
) -> None:
    ended = repository.run("-m", "model", "--model", spec)
    assert (ended.code, ended.text.count(text)) == (4, 1), ended.text
    assert "REGRESSION" not in ended.text


def test_outside_of_the_checks_it_is_an_error_and_no_skip(tmp_path: Path) -> None:
    """A test of the suite would pass unseen whose own model broke."""
    repository = copy_repository(tmp_path)
    (repository.root / "test_mine.py").write_text(
        "from fixtures.own_model.factory import UserModelError\n\n"
        "def test_mine():\n    raise UserModelError('broken')\n"
    )
    ended = repository.run("test_mine.py")
    assert (ended.code, "1 failed" in ended.text) == (1, True), ended.text
