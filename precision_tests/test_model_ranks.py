"""A model of one's own over ranks: ``pytest --model package.module:factory``.

The step of test_model.py, its micro-batches spread over 2 and 4 ranks: sharded and replicated, it
has the same truth and the same bound. docs/your_model.md tells of both.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.numerics.formats import FP32
from fixtures.own_model import comparisons, factory, rank_jobs
from fixtures.own_model.factory import DOES_NOT_REPEAT, UserModel
from fixtures.own_model.step import Step, Truth, errors, fresh, repeatable, run_step, truth_of
from precision_tests.test_model import first_difference, flat, hold, is_inside, skip_if_meant

world_sizes = pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")


@pytest.fixture
def spec(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.option.model)


def leaves_parameters_out(user: UserModel, device: Device) -> bool:
    """Whether the step leaves a parameter without a gradient."""
    trained = [name for name, p in user.model.named_parameters() if p.requires_grad]
    return truth_of(user, device.torch).step.gradients.keys() != set(trained)


@pytest.mark.takes_ranks(1)
def test_fresh_process_repeats_the_step(
    check: Check, user: UserModel, device: Device, ranks: RunRanks, spec: str
) -> None:
    """The factory's product, and every bit of the step."""
    skip_if_meant(user, DOES_NOT_REPEAT)
    ((digest, step),) = ranks(rank_jobs.alone, 1, spec)
    check.exact(digest, factory.digest(user), name="factory")
    with repeatable(device.torch):
        here = run_step(user, fresh(user, device.torch))
    check.exact(first_difference(step, here), "none", name="first-difference")


@pytest.mark.parametrize("implementation", rank_jobs.WRAPPERS)
@world_sizes
def test_step_is_that_of_float64(
    check: Check,
    user: UserModel,
    device: Device,
    ranks: RunRanks,
    spec: str,
    world_size: int,
    implementation: str,
) -> None:
    """Mean loss and gradients; all ranks hold the same gradients.

    A loss over the rows of all ranks is that of the batches that they hold, joined.
    """
    unused = leaves_parameters_out(user, device)
    found = ranks(rank_jobs.step_over_ranks, world_size, spec, implementation, unused)
    for rank, step in enumerate(found[1:], start=1):
        same = Step(found[0].loss, step.gradients)
        check.exact(first_difference(same, found[0]), "none", name=f"rank{rank}-as-rank0")
    got = Step(sum(step.loss for step in found) / world_size, found[0].gradients)
    truth, theorem = truth_of(user, device.torch), f"flow of the model over {world_size} ranks"
    if not holds(got, truth):
        if ranks(rank_jobs.collectives_of_loss, world_size, spec)[0]:
            truth, theorem = joined_truth(user, device, world_size), f"{theorem}, their rows joined"
        elif carried := comparisons.carried_over(user):
            pytest.skip(
                f"a micro-batch changes {', '.join(carried[:3])}, and the loss of the next depends "
                "on it: on ranks, each with its own, the step is another one"
            )
    want = Step(truth.step.loss, truth.step.gradients)
    hold(check, got, want, truth.limits(FP32, seen=False), theorem)


def holds(got: Step, truth: Truth) -> bool:
    off = errors(got.quantities(), Step(truth.step.loss, truth.step.gradients).quantities())
    limits = truth.limits(FP32, seen=False)
    return is_inside(off, {name: limits.get(name, 0.0) for name in off})


def joined_truth(user: UserModel, device: Device, world_size: int) -> Truth:
    if truth_of(user, device.torch).recorded.draws:
        pytest.skip("a loss over all ranks' rows, and dropout: no single process has their draws")
    try:
        return comparisons.truth_over_ranks(user, device.torch, world_size)
    except ValueError as error:
        pytest.skip(f"the batches of the ranks cannot be joined into one: {error}")


def test_saved_by_two_ranks_and_loaded_by_one(
    check: Check, user: UserModel, device: Device, ranks: RunRanks, spec: str, tmp_path: Path
) -> None:
    """Parameters and optimizer state, through torch.distributed.checkpoint.

    Not buffers: running statistics are each rank's own.
    """
    unused = leaves_parameters_out(user, device)
    state = ranks(rank_jobs.save_over_ranks, 2, spec, unused, tmp_path / "saved")[0]
    model = fresh(user, device.torch)
    buffers = dict(model.named_buffers())
    saved = {name: value for name, value in state.items() if name not in buffers}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = user.new_optimizer(model)
    rank_jobs.load(model, optimizer, tmp_path / "saved")
    loaded = rank_jobs.whole_state(model, optimizer)
    check.exact(sorted(saved.keys() - loaded.keys()), [], name="lost")
    check.exact(flat({name: loaded[name] for name in saved}), flat(saved), name="values")
