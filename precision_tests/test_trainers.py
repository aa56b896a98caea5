"""Training loops of other projects: accelerate, transformers.Trainer, lightning.Trainer.

An upgrade of a trainer is an upgrade of the framework. Each runs its own loop around one small
model; an optimizer writes down the parameters and gradients of every update.

What goes wrong: the mean of means over micro-batches with unequal numbers of targets; a last window
that is partial and divided by the size of a whole one; clipping before the sum is complete, or of
scaled gradients; a step on gradients that overflowed; another order of the data after a resume.

Truth: the float64 gradient of the mean over all targets of the window, at the parameters that the
update started from. Bound: the flow bound of docs/your_model.md. Orders and counts are exact.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fixtures.check import Check
from fixtures.numerics.clipping_bounds import clipped
from fixtures.numerics.formats import FP16, FP32, Format
from fixtures.own_model.factory import UserModel
from fixtures.own_model.step import Truth, errors
from fixtures.trainers import with_accelerate, with_lightning, with_transformers
from fixtures.trainers.common import (
    IGNORE,
    OVERFLOWS,
    RATE,
    Job,
    OverflowingModel,
    PlainModel,
    Row,
    Rows,
    Update,
    windows,
)
from fixtures.trainers.common import Model as TrainedModel
from fixtures.trainers.versions import unusable

Train = Callable[[Job, Path], list[Update]]
Orders = Callable[[Job, int, Path], tuple[list[int], list[int]]]
SOURCE = "docs/your_model.md; Hsu, Kakade, Zhang 2012"

TRAIN: dict[str, Train] = {
    "accelerate": with_accelerate.train,
    "accelerate-by-tokens": with_accelerate.train_by_tokens,
    "transformers": with_transformers.train,
    "transformers-plain-model": with_transformers.train,
    "lightning": with_lightning.train,
}
ORDERS: dict[str, Orders] = {
    "accelerate": lambda *a: with_accelerate.orders(*a, seedable=False),
    "accelerate-seedable": lambda *a: with_accelerate.orders(*a, seedable=True),
    "transformers": with_transformers.orders,
    "lightning": with_lightning.orders,
}


def loops(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("implementation", names)


@pytest.fixture(autouse=True)
def installed(implementation: str, pytestconfig: pytest.Config) -> None:
    """UNVERIFIED where a trainer is not installed, or older than declared."""
    package = implementation.partition("-")[0]
    needed = (package, "accelerate") if package == "transformers" else (package,)
    for name in needed:
        if why := unusable(name, pytestconfig.rootpath / "pyproject.toml"):
            pytest.skip(why)


def run(job: Job, implementation: str, folder: Path) -> list[Update]:
    if implementation == "transformers-plain-model":
        job = replace(job, model=PlainModel)
    with usable():
        return TRAIN[implementation](job, folder)


@contextmanager
def usable() -> Iterator[None]:
    """UNVERIFIED where a trainer refuses this torch."""
    try:
        yield
    except ImportError as error:
        said = " ".join(str(error).split())
        pytest.skip(f"the trainer cannot be imported here: {said}")


# --- truth --------------------------------------------------------------------------------------


def mean_loss(model: nn.Module, batch: Row) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


@cache
def _truth(parameters: bytes, window: bytes, fmt: Format) -> tuple[dict[str, Tensor], ...]:
    """Gradients and limits by the bytes of what they depend on: trainers take the same path."""
    model = TrainedModel()
    model.load_state_dict(torch.load(io.BytesIO(parameters)))
    batches: list[Row] = torch.load(io.BytesIO(window))
    valid = [int((batch["labels"] != IGNORE).sum()) for batch in batches]
    weights = {index: count / sum(valid) for index, count in enumerate(valid)}
    truth = Truth(UserModel(model, mean_loss, batches), torch.device("cpu"), weights)
    limits = truth.limits(fmt)
    gradients = truth.step.gradients
    return gradients, {n: torch.tensor(limits[f"gradient of {n}"]) for n in gradients}


def truth_of(
    update: Update, window: list[Row], fmt: Format
) -> tuple[dict[str, Tensor], dict[str, float]]:
    packed = []
    for content in (update.parameters, window):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        packed.append(buffer.getvalue())
    gradients, limits = _truth(packed[0], packed[1], fmt)
    return gradients, {name: float(limit) for name, limit in limits.items()}


def hold(
    check: Check, updates: list[Update], kept: list[list[Row]], job: Job, name: str = "window"
) -> None:
    """Holds each update's gradients to those of its window; nothing else moves parameters."""
    check.exact(len(updates), len(kept), name="updates")
    fmt = FP16 if job.scale else FP32
    for number, (update, window) in enumerate(zip(updates, kept, strict=True)):
        gradients, limits = truth_of(update, window, fmt)
        if job.max_norm:
            norms = {n: float(g.norm()) for n, g in gradients.items()}
            entries = sum(g.numel() for g in gradients.values())
            factor, limits = clipped(limits, norms, entries, job.max_norm, FP32)
            gradients = {n: factor * g for n, g in gradients.items()}
        check.within_figures(
            errors(update.gradients, gradients),
            limits,
            torch.cat([update.gradients[n].flatten() for n in gradients]),
            theorem=f"flow of the model in {fmt.name}" + (", clipped" if job.max_norm else ""),
            source=SOURCE,
            name=f"{name}{number}",
        )
    for number, (before, after) in enumerate(itertools.pairwise(updates)):
        moved = {n: p - RATE * before.gradients[n] for n, p in before.parameters.items()}
        same = [n for n in moved if not torch.equal(moved[n], after.parameters[n])]
        check.exact(same, [], name=f"moved-otherwise-before-update{number + 1}")


# --- gradients ----------------------------------------------------------------------------------


@loops("accelerate-by-tokens", "transformers", "transformers-plain-model", "lightning")
def test_unequal_micro_batches_weigh_by_their_targets(
    check: Check, implementation: str, tmp_path: Path
) -> None:
    job = Job(rows=Rows(12, lambda index: index % 5), window=3)
    hold(check, run(job, implementation, tmp_path), windows(job.rows.batches(), 3), job)


@loops(*TRAIN)
def test_last_window_is_divided_by_its_own_size(
    check: Check, implementation: str, tmp_path: Path
) -> None:
    """All batches have as many targets; three windows, the last one of one batch."""
    job = Job(rows=Rows(14, lambda index: 0), window=3)
    hold(check, run(job, implementation, tmp_path), windows(job.rows.batches(), 3), job)


@loops("accelerate", "transformers", "lightning")
def test_clips_the_norm_of_the_whole_window(
    check: Check, implementation: str, tmp_path: Path
) -> None:
    job = Job(rows=Rows(12, lambda index: 0), window=3, max_norm=0.25)
    hold(check, run(job, implementation, tmp_path), windows(job.rows.batches(), 3), job)


@loops("accelerate", "transformers", "lightning")
@pytest.mark.parametrize("max_norm", [0.0, 0.25], ids=["free", "clipped"])
def test_scaler_unscales_once_and_skips_what_overflows(
    check: Check, implementation: str, max_norm: float, tmp_path: Path
) -> None:
    """fp16 autocast and a scaler on the CPU, which trainers do not put there themselves."""
    job = Job(OverflowingModel, Rows(10, lambda index: 0), max_norm=max_norm, scale=1024.0)
    kept = [w for w in windows(job.rows.batches(), 1) if OVERFLOWS not in w[0]["index"].tolist()]
    hold(check, run(job, implementation, tmp_path), kept, job)


PLACES = {"epoch0-middle": 4, "epoch0-end": 10, "epoch1-middle": 14}
"""Batches of two rows, of ten in an epoch, before the run is saved."""

# --- order --------------------------------------------------------------------------------------


@loops(*ORDERS)
@pytest.mark.parametrize("place", PLACES)
def test_resumed_order_is_that_of_one_run(
    check: Check, implementation: str, place: str, tmp_path: Path
) -> None:
    """20 rows, shuffled anew in each of three epochs; saved at ``place`` and resumed."""
    stop = PLACES[place]
    job = Job(rows=Rows(20, lambda index: 0), epochs=3, shuffle=True)
    with usable():
        whole, resumed = ORDERS[implementation](job, stop, tmp_path)
    size = len(job.rows)
    epochs = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert len({tuple(epoch) for epoch in epochs}) == job.epochs  # or the check would see nothing
    again = [resumed[i : i + size] for i in range(0, len(resumed), size)]
    first = next((k for k, (a, b) in enumerate(zip(again, epochs, strict=True)) if a != b), None)
    seen_twice = [size - len(set(epoch)) for epoch in again]
    check.exact(seen_twice, [0] * job.epochs, name="rows-seen-twice")
    check.exact(first, None, name="first-epoch-in-another-order")
