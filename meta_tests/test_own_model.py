"""``--model``: sound models stay green, a planted defect is caught, bad input is told so."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.numerics.derivative_bounds import Quotients, difference_quotient
from fixtures.numerics.formats import BF16, FP16, FP32, Format
from fixtures.own_model import factory, rank_jobs
from fixtures.own_model.factory import UserModelError, blocks, load
from fixtures.own_model.rounding import EVERYWHERE, SIXTEEN
from fixtures.own_model.step import Truth, errors, fresh, recorded_step, run_step
from meta_tests import own_models
from meta_tests.running import ROOT, Repository, copy_repository

MODELS = "meta_tests.own_models"
CPU = torch.device("cpu")
CHECKS = ("precision_tests/test_model.py", "precision_tests/test_model_ranks.py")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A copy with the checks of a user's model, and the models of ``own_models`` beside it."""
    made = copy_repository(tmp_path_factory.mktemp("model"), "model", "model_ranks")
    shutil.copy(ROOT / "meta_tests" / "own_models.py", made.root / "own_models.py")
    return made


# --- models through --model ---------------------------------------------------------------------

DEFECTS = (
    ("wrong_backward", "derivatives", "worst in blocks."),
    ("tanh_form_backward", "derivatives", "the backward pass does not match the forward pass"),
    ("detached", "derivatives", "the backward pass does not match"),
    ("forgetful_checkpoint", "derivatives", "a recomputation with other random numbers"),
    ("sixteen_bit_sum", "step_is and fp32", "first to leave its bound, in the order of the step: "),
    ("unseeded", "repeats and fp32 and not ranks", "got 'output of blocks.0.down'"),
    ("always_drops", "eval_draws", "got 4"),
    ("forgets_momentum", "saved_and", "state-after"),
    ("sixteen_bit_update", "update", "flow of the update in fp32"),
    ("other_each_time", "factory_repeats", "breaks an exact invariant"),
    ("sum_over_ranks", "w2-fully_shard", "first to leave its bound, in the order of the step: gra"),
    ("detached_when_sharded", "w2-fully_shard", "gradient of embedding.weight"),
)


@pytest.mark.parametrize(("factory", "checks", "text"), DEFECTS, ids=[d[0] for d in DEFECTS])
def test_planted_defect_is_caught(
    repository: Repository, factory: str, checks: str, text: str
) -> None:
    ended = repository.run(*CHECKS, "--model", f"own_models:{factory}", "-k", checks)
    assert ended.code == 1, ended.text
    assert text in ended.text, ended.text


def test_sound_model_passes_and_has_its_place_in_the_record(repository: Repository) -> None:
    named = ("--model", "own_models:sound", "-m", "not compiled")
    quick = "fp32 or saved_and or update"
    record_ = repository.record(*CHECKS, *named, "-k", quick, to="sound")
    assert '"node": "model"' in (record_ / "cases.json").read_text()
    assert "--model" in (record_ / "run.json").read_text()


def test_without_the_option_there_are_no_checks_of_it(repository: Repository) -> None:
    assert "no tests collected" in repository.run("--collect-only", "-q", "precision_tests").text
    ended = repository.run(CHECKS[0])
    assert ended.code == 4
    assert "--model package.module:factory" in ended.text


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("nowhere:factory", "there is no module nowhere; run pytest from the folder that holds it"),
        ("own_models:sixteen_bit_parameters", "parameters are torch.bfloat16; build the model in"),
        ("own_models:two_things", "the factory returned a tuple of 2; return (model, loss"),
    ],
)
def test_what_cannot_be_used_ends_the_run(repository: Repository, spec: str, text: str) -> None:
    ended = repository.run("--model", spec)
    assert (ended.code, text in ended.text) == (4, True), ended.text


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_example_of_the_documentation_passes(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "model", "model_ranks")
    shutil.copytree(ROOT / "docs" / "examples", repository.root / "docs" / "examples")
    named = ("--model", "docs.examples.transformers_model:factory", "-m", "not compiled")
    ended = repository.run(*CHECKS, *named, "-k", "fp32 or w2 or derivatives")
    assert ended.code == 0, ended.text


# --- what cannot be checked ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("own_models", "own_models is not of the form package.module:name"),
        ("docs/examples/a.py:f", "docs/examples/a.py as docs.examples.a"),
        (f"{MODELS}:nothing", f"module {MODELS} has no nothing; it has: "),
        (f"{MODELS}:__doc__", f"{MODELS}:__doc__ is a str, which cannot be called"),
        (f"{MODELS}:raises", "the factory raised RuntimeError: no data here"),
        (f"{MODELS}:no_batches", "batches must be a list with at least one batch"),
        (f"{MODELS}:without_parameters", "no parameter that requires a gradient"),
        (f"{MODELS}:misspelt", "deliberate holds stops gradient; known are stops gradients"),
    ],
)
def test_unusable_factories_are_refused(spec: str, text: str) -> None:
    with pytest.raises(UserModelError, match=text.replace("(", r"\(")):
        load(spec)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("loss", None, "loss is a NoneType; it must be a function, loss(model, batch), that"),
        ("wrap", 3, "wrap is a int; it must be a function, wrap(model), that applies fully_shard"),
        ("optimizer", "AdamW", "optimizer is a str; it must be a function, optimizer(parameters)"),
        ("valid", 4, "valid is a int; it must be a function, valid(batch), that counts"),
        ("deliberate", "draws in eval", "must be a tuple of words, as ('draws in eval',)"),
    ],
)
def test_fields_of_another_kind_are_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, text: str
) -> None:
    made = replace(own_models.user(own_models.Model()), **{field: value})
    monkeypatch.setattr(own_models, "odd", lambda: made, raising=False)
    with pytest.raises(UserModelError, match=re.escape(text)):
        load(f"{MODELS}:odd")


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("vector_loss", r"the loss is of shape \(3, 2\)"),
        ("without_gradient", "does not depend on any parameter"),
        ("opaque", r"precision_meta.single.default cannot run in float64 \(it returned torch.flo"),
    ],
)
def test_unusable_steps_are_refused(factory: str, text: str) -> None:
    with pytest.raises(UserModelError, match=text):
        Truth(load(f"{MODELS}:{factory}"), CPU).step  # noqa: B018


# --- truth and bound ----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda fmt: fmt.name)
def test_many_kinds_of_layers_lie_inside_their_bound_and_not_far(
    monkeypatch: pytest.MonkeyPatch, fmt: Format
) -> None:
    """Convolution, batch norm, recurrence, attention, casts, a tied weight: margins of 0.02 to 0.3
    and a median of 0.07, as those of the reference step."""
    monkeypatch.setattr("fixtures.own_model.step.DRAWS", 4)
    user = load(f"{MODELS}:all_kinds")
    truth = Truth(user, CPU)
    autocast = None if fmt is FP32 else fmt.dtype
    got, recorded = recorded_step(user, CPU, autocast)
    want = truth.of(recorded).quantities()
    limits = truth.limits(fmt)
    margins = sorted(e / limits[n] for n, e in errors(got.quantities(), want).items() if limits[n])
    assert margins[-1] < 1
    assert 1 / 30 < margins[len(margins) // 2] < 1 / 5


def test_truth_does_not_depend_on_casts_of_the_model() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.full((3,), 3, dtype=torch.float16) / 7
            return self.linear((x.bfloat16() * scale).float().sum(0, dtype=torch.float32))

    x = torch.randn(2, 3)
    user = factory.UserModel(Casts(), lambda model, batch: model(batch).sum(), [x])
    weight, bias = user.model.linear.weight.double(), user.model.linear.bias.double()
    want = ((x.double() * (torch.tensor(3.0).double() / 7)).sum(0) * weight).sum() + bias
    assert Truth(user, CPU).step.loss == pytest.approx(want.item(), rel=2.0**-50)


def test_sixteen_bits_are_found_where_autocast_puts_them() -> None:
    """Norms and the loss stay in fp32: noise in 16-bit places leaves the first norm alone."""
    user = load(f"{MODELS}:sound")
    truth = Truth(user, CPU, {0: 1.0})
    recorded = truth.record(torch.bfloat16)
    assert set(recorded.rounded) == {
        *(f"blocks.{i}.{part}.{kind}" for i in (0, 1) for part in ("up", "down") for kind in KINDS),
        *(f"head.{kind}" for kind in KINDS),
    }
    response = truth.response(recorded, SIXTEEN, backward=False).sizes
    assert response["output of blocks.0.norm"] == 0.0
    assert response["output of blocks.0.up"] > 0.0


KINDS = ("weight", "bias")


def test_noise_in_the_loss_is_that_of_its_operations() -> None:
    """y = a x: one product, of which each element errs by a uniform unit, and one sum of 4."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.75)  # whole numbers would be exact
    user = factory.UserModel(model, lambda m, b: (m.weight[0] * b).sum(), [torch.ones(4)])
    truth = Truth(user, CPU, {0: 1.0})
    found = truth.response(truth.recorded, EVERYWHERE, backward=False).sizes["loss"]
    # Variances, in thirds: of 4 products 4; of the sum's partial sums 5 (16/3 + 4/6) + 4, its own
    # storing 16.
    want = 0.75 * ((4 + 5 * (16 / 3 + 4 / 6) + 4 + 16) / 3) ** 0.5
    assert found == pytest.approx(want, rel=0.5)


def test_blocks_are_the_repeated_layers_that_share_nothing() -> None:
    assert len(blocks(load(f"{MODELS}:sound").model)) == 2
    names = {type(block).__name__ for block in blocks(load(f"{MODELS}:all_kinds").model)}
    assert names == {"Conv1d", "BatchNorm1d", "GRU", "MultiheadAttention", "Linear"}
    assert len(blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)))) == 2
    level = nn.ModuleDict({"down": nn.Linear(1, 1), "up": nn.Sequential(nn.Linear(1, 1))})
    levels = nn.ModuleDict({"levels": nn.ModuleList([level])})  # containers have no forward
    assert blocks(levels) == [level["down"], level["up"]]


def test_difference_quotient_accepts_either_slope_at_a_kink_and_no_other() -> None:
    h = 2.0**-20
    kink = Quotients(h, 0.0, h, 0.0, h / 2, 0.0)  # ReLU at 0
    limit = difference_quotient(kink, 0.0)
    assert kink.derivative == 0.5
    assert limit == 0.5
    smooth = Quotients(h, 1.0, *((1 + step) ** 2 for step in (h, -h, h / 2, -h / 2)))
    assert abs(2.0 - smooth.derivative) <= difference_quotient(smooth, 2.0**-52) < 1 / 1000


def test_a_wrapper_s_names_go_and_the_model_s_own_stay() -> None:
    names = ("submodule.weight", "module.weight", "blocks.0._orig_mod.up", "_orig_mod.module.bias")
    found = rank_jobs.clean(dict.fromkeys(names))
    assert list(found) == ["submodule.weight", "module.weight", "blocks.0.up", "module.bias"]


def test_complex_buffers_and_wide_ones_keep_what_they_hold() -> None:
    user = load(f"{MODELS}:rotary")
    own, widened = (dict(fresh(user, CPU, widened=w).named_buffers()) for w in (False, True))
    for name, dtype in (("freqs", torch.complex128), ("shift", torch.float64)):
        assert torch.equal(own[name], dict(user.model.named_buffers())[name])
        assert torch.equal(widened[name], own[name].to(dtype))
    truth = Truth(user, CPU)
    found = errors(run_step(user, fresh(user, CPU)).quantities(), truth.step.quantities())
    limits = truth.limits(FP32)
    assert all(found[name] <= limits[name] for name in found)


def test_a_loss_of_another_model_is_told_so() -> None:
    user = load(f"{MODELS}:another_model")
    with pytest.raises(UserModelError, match="must run the model that it is given"):
        run_step(user, fresh(user, CPU))
