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
from fixtures.own_model import factory, rank_jobs
from fixtures.own_model.factory import UserModel
from fixtures.own_model.step import Step, fresh, run_step, truth_of
from precision_tests.test_model import first_difference, flat, hold

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
    ((digest, step),) = ranks(rank_jobs.alone, 1, spec)
    check.exact(digest, factory.digest(user), name="factory")
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
    """Mean loss and gradients; all ranks hold the same gradients."""
    unused = leaves_parameters_out(user, device)
    found = ranks(rank_jobs.step_over_ranks, world_size, spec, implementation, unused)
    for rank, step in enumerate(found[1:], start=1):
        same = Step(found[0].loss, step.gradients)
        check.exact(first_difference(same, found[0]), "none", name=f"rank{rank}-as-rank0")
    truth = truth_of(user, device.torch)
    got = Step(sum(step.loss for step in found) / world_size, found[0].gradients)
    want = Step(truth.step.loss, truth.step.gradients)
    hold(check, got, want, truth.limits(FP32), f"flow of the model over {world_size} ranks")


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
