"""The checks of other projects' training loops can fail: defects planted in torch and in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.check import BoundExceededError, Check
from fixtures.numerics.clipping_bounds import clipped
from fixtures.numerics.formats import FP32
from fixtures.record import Case
from fixtures.trainers.common import OVERFLOWS, Job, OverflowingModel, Rows, windows
from meta_tests.running import copy_repository

MISSING = [n for n in ("accelerate", "lightning") if importlib.util.find_spec(n) is None]
installed = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
trainers = pytest.mark.parametrize("trainer", ["accelerate", "lightning"])

SCALED = Job(OverflowingModel, Rows(10, lambda index: 0), max_norm=0.25, scale=1024.0)


def hold(trainer: str, job: Job, folder: Path) -> None:
    """The check of the precision tests, outside of a run."""
    from precision_tests import test_trainers

    case = Case("trainers", "whole", "planted", "cpu", implementation=trainer)
    check = Check(case, {"torch": torch.__version__})
    kept = windows(job.rows.batches(), job.window)
    kept = [w for w in kept if not job.scale or OVERFLOWS not in w[0]["index"].tolist()]
    test_trainers.hold(check, test_trainers.run(job, trainer, folder), kept, job)


@installed
@trainers
@pytest.mark.filterwarnings("ignore")
class TestPlanted:
    def test_nothing(self, trainer: str, tmp_path: Path) -> None:
        hold(trainer, SCALED, tmp_path)

    def test_clipping_of_scaled_gradients(
        self, trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def leave(scaler: Any, optimizer: Any) -> None:
            """Scaled gradients are clipped; ``step`` unscales them afterwards."""

        monkeypatch.setattr(torch.amp.GradScaler, "unscale_", leave)
        with pytest.raises((BoundExceededError, AssertionError)):
            hold(trainer, SCALED, tmp_path)

    def test_step_on_what_overflowed(
        self, trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def always(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", always)
        with pytest.raises(BoundExceededError, match="got 5\n  wanted 4"):
            hold(trainer, SCALED, tmp_path)

    def test_clipping_by_twice_the_norm(
        self, trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clip = torch.nn.utils.clip_grad_norm_

        def twice(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            return clip(parameters, 2.0 * max_norm, *args, **kwargs)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", twice)
        job = Job(rows=Rows(4, lambda index: 0), max_norm=0.25)
        with pytest.raises(BoundExceededError, match="clipped"):
            hold(trainer, job, tmp_path)


@pytest.mark.parametrize(
    ("file", "old", "new", "remedy"),
    [
        (
            "fixtures/trainers/versions.py",
            "metadata.version(package)",
            'metadata.version("no-such-package")',
            "accelerate is not installed: pip install training-precision-suite[trainers]",
        ),
        (
            "pyproject.toml",
            '["accelerate>=1.8", "transformers>=4.52", "lightning>=2.5"]',
            '["accelerate>=99", "transformers>=99", "lightning>=99"]',
            "is not checked: pip install 'accelerate>=99'",
        ),
    ],
)
def test_trainers_that_are_absent_or_too_old_are_unverified_by_name(
    tmp_path: Path, file: str, old: str, new: str, remedy: str
) -> None:
    repository = copy_repository(tmp_path, "trainers")
    repository.edit(file, old, new)
    ended = repository.run("precision_tests", "--require", "trainers")
    assert ended.code == 22, ended.text
    assert remedy in ended.text
    assert "REGRESSION" not in ended.text


def test_clipped_gradients_have_the_norm_asked_for() -> None:
    limits, norms = {"a": 2.0**-24, "b": 2.0**-23}, {"a": 3.0, "b": 4.0}
    factor, off = clipped(limits, norms, 10, 2.5, FP32)
    assert factor == pytest.approx(0.5, rel=2.0**-20)
    assert 0.5 * limits["a"] < off["a"] < 2.0**-18
    assert clipped(limits, norms, 10, 6.0, FP32)[0] == 1.0
