"""Whole steps under the wrappers that train over ranks: DDP, FSDP1, fully_shard, hybrid meshes.

What goes wrong: a sum for a mean; replicas that never meet; a local norm; gradients held back that
are never sent, or sent twice; a rank that computes with stale weights; a step skipped on some
ranks; another format than was asked for. The loss shows none of it.

Each step of each rank is held to (docs/theory/sharding.md)

1. the ranks: copies of the model have the same bits, norms and scales are one number;
2. one process: gradients are the mean of what an unwrapped model has on each rank's rows, element
   by element, and lie within the flow bounds of what it has on the whole batch;
3. float64: gradients within the flow bound of the truth, the norm, the clipped gradients, the
   parameters and the optimizer's state within the bounds of their formulas.

257 rows shard unevenly over any number of ranks. A second step on the same batch shows stale
weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed import wrapping as wrappers
from fixtures.distributed.ranks import RunRanks
from fixtures.distributed.wrapping import Wrapping
from fixtures.golden import LoadTruth
from fixtures.numerics.formats import FP32
from fixtures.training import wrapped_step
from fixtures.training.truth import CONFIG, StepTruth
from fixtures.training.wrapped_checks import (
    Whole,
    changed,
    check_agreement,
    check_flow,
    check_mean,
    check_norm,
    check_steps,
    check_update,
    flat,
    mean_bound,
)
from fixtures.training.zero import PLAIN, zero3

WRAPPINGS = {
    "ddp": Wrapping("ddp"),
    "fully_shard": Wrapping("fully_shard"),
    "fsdp1-full": Wrapping("fsdp1", "FULL_SHARD"),
    "fsdp1-flat": Wrapping("fsdp1", "FULL_SHARD", flat=True),
    "fsdp1-grad-op": Wrapping("fsdp1", "SHARD_GRAD_OP"),
    "fsdp1-no-shard": Wrapping("fsdp1", "NO_SHARD"),
}
MESHES = {
    f"{name}-{replicas}x{4 // replicas}": Wrapping(kind, "HYBRID_SHARD", replicas)
    for name, kind in (("fully_shard", "fully_shard"), ("fsdp1-hybrid", "fsdp1"))
    for replicas in (1, 2, 4)
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "reduce-bf16": {"reduce_dtype": torch.bfloat16},
    "bf16-reduce-fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}
MAIN = ("ddp", "fully_shard", "fsdp1-full")

# (world size, wrapper, formats); every case in fp32, the formats where ranks and rows are uneven.
STEPS = [
    *((w, name, "fp32") for w in (1, 2, 3, 4) for name in WRAPPINGS),
    *((w, name, "bf16-reduce-fp32") for w in (1, 3, 4) for name in MAIN),
    *((w, name, "bf16") for w in (3, 4) for name in MAIN[1:]),
    *((4, name, "fp32") for name in MESHES),
    *((4, name, "bf16") for name in ("fully_shard-2x2", "fsdp1-hybrid-2x2")),
    *((2, name, "reduce-bf16") for name in MAIN),
    *((8, name, "fp32") for name in MAIN),
]
HELD_BACK = [
    *((2, name, "fp32") for name in WRAPPINGS),
    *((4, name, "fp32") for name in ("fully_shard-2x2", "fsdp1-hybrid-2x2")),
    *((4, name, "bf16-reduce-fp32") for name in MAIN),
]


def wrapping(implementation: str, formats: str, **options: Any) -> Wrapping:
    return replace({**WRAPPINGS, **MESHES}[implementation], **FORMATS[formats], **options)


def cases(chosen: list[tuple[int, str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("world_size", "implementation", "formats"),
        chosen,
        ids=[f"w{w}-{name}-{formats}" for w, name, formats in chosen],
    )


def check_trained(
    check: Check,
    truth: LoadTruth,
    ranks: RunRanks,
    device: Device,
    world_size: int,
    wrapped: Wrapping,
    *,
    hold_back: bool = False,
) -> None:
    step = StepTruth.load(truth)
    inputs = (wrapped, step.parameters, step.micro_batches)
    found = ranks(wrapped_step.train, world_size, *inputs, hold_back=hold_back)
    check_steps(check, found, step, wrapped, device.torch, hold_back=hold_back)


@cases(STEPS)
def test_two_steps(
    check: Check,
    truth: LoadTruth,
    ranks: RunRanks,
    device: Device,
    world_size: int,
    implementation: str,
    formats: str,
) -> None:
    """Gradients of each micro-batch are reduced at once, clipped, and move the parameters."""
    wrapped = wrapping(implementation, formats)
    check_trained(check, truth, ranks, device, world_size, wrapped)


@cases(HELD_BACK)
def test_two_steps_synchronised_once(
    check: Check,
    truth: LoadTruth,
    ranks: RunRanks,
    device: Device,
    world_size: int,
    implementation: str,
    formats: str,
) -> None:
    """no_sync, set_requires_gradient_sync: only the last micro-batch's backward reduces."""
    wrapped = wrapping(implementation, formats)
    check_trained(check, truth, ranks, device, world_size, wrapped, hold_back=True)


@pytest.mark.parametrize("implementation", ["fully_shard", "fsdp1-full"])
def test_two_steps_offloaded(
    check: Check, truth: LoadTruth, ranks: RunRanks, device: Device, implementation: str
) -> None:
    """Shards and optimizer state live on the CPU."""
    wrapped = wrapping(implementation, "fp32", offload=True)
    check_trained(check, truth, ranks, device, 2, wrapped)


# --- steps that are not taken, blocks that are computed again -------------------------------------

SPREAD = {
    name: (4 if "x" in name else 2, wrapping(name, "fp32"))
    for name in (*WRAPPINGS, "fully_shard-2x2", "fsdp1-hybrid-2x2", "fully_shard-4x1")
}
SPOILED: dict[str, list[float | None]] = {
    "never": [None, None],
    "first": [math.nan, math.inf, None, None],
    "later": [None, -math.inf, math.nan, None],
}
spread = pytest.mark.parametrize(
    "implementation",
    [pytest.param(name, marks=pytest.mark.takes_ranks(w)) for name, (w, _) in SPREAD.items()],
)


@spread
def test_nonfinite_on_one_rank_skips_the_step_on_all(
    check: Check, truth: LoadTruth, ranks: RunRanks, implementation: str
) -> None:
    """At the first step and at later ones: nothing changes but the scale, and what follows is
    what would have been, bit for bit."""
    step, (world_size, wrapped) = StepTruth.load(truth), SPREAD[implementation]
    inputs = (wrapped, step.parameters, step.micro_batches)
    start = {"parameter": {name: value.float() for name, value in step.parameters.items()}}
    ends = {}
    for name, planted in SPOILED.items():
        moments = list(zip(*ranks(wrapped_step.skip, world_size, *inputs, planted), strict=True))
        before, halved = [start] * len(wrappers.copies_of(moments[0])), 0
        for number, (value, moment) in enumerate(zip(planted, moments, strict=True)):
            after = wrappers.copies_of(moment)
            if value is not None:
                halved += 1
                check.exact(changed(before, after), [], name=f"{name}-step{number}-skipped")
            scales = [rank.scaler["scale"] for rank in moment]
            want = [CONFIG.loss_scale / 2**halved] * world_size
            check.exact(scales, want, name=f"{name}-step{number}-scale")
            before = after
        ends[name] = before
    for name, copies in ends.items():
        check.exact(changed(ends["never"][:1] * len(copies), copies), [], name=f"{name}-end")


@spread
def test_recomputed_blocks_change_nothing(
    check: Check, truth: LoadTruth, ranks: RunRanks, implementation: str
) -> None:
    """Activation checkpointing around each block, with dropout: gradients have the same bits."""
    step, (world_size, wrapped) = StepTruth.load(truth), SPREAD[implementation]
    found = ranks(wrapped_step.recompute, world_size, wrapped, step.parameters, step.micro_batches)
    for rank, (plain, recomputed) in enumerate(found):
        check.exact(changed([{"": plain}], [{"": recomputed}]), [], name=f"rank{rank}")
        check.exact(sorted(recomputed), sorted(plain), name=f"rank{rank}-names")


@pytest.mark.needs_package("deepspeed", "zero")
def test_two_steps_under_zero3(
    check: Check, truth: LoadTruth, ranks: RunRanks, device: Device
) -> None:
    """DeepSpeed's ZeRO-3 by the same measure, and against fully_shard; without clipping."""
    step, names = StepTruth.load(truth), list(StepTruth.load(truth).parameters)
    inputs = (step.parameters, step.micro_batches)
    steps = [
        Whole.of(ranks_of_step) for ranks_of_step in zip(*ranks(zero3, 2, *inputs), strict=False)
    ]
    before = {"parameter": step.parameters}
    for number, found in enumerate(steps, start=1):
        name = f"step{number}"
        check_agreement(check, found, name)
        check_mean(check, found, names, 2, PLAIN, False, name)
        check_norm(check, found, names, name)
        check_update(check, before, found, names, number, name)
        before = found.copies[0]
    check_flow(check, steps[0], step, PLAIN, 2, device.torch, False)
    sharded = Whole.of(
        [of[0] for of in ranks(wrapped_step.train, 2, Wrapping("fully_shard"), *inputs, 1)]
    )
    bound = mean_bound(steps[0], names, 2, FP32)
    want = flat(sharded["gradient"], names).double()
    check.within(flat(steps[0]["gradient"], names), want, bound + bound, name="fully-shard")
