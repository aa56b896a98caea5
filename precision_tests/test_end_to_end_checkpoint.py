"""Training that is saved, loaded over as many or over other ranks, and goes on; and its export.

What goes wrong: the optimizer's moments or its step count stay behind, or land at other
parameters; the scaler or a rank's random stream starts anew; what is exported is the copy in the
format of the computation. The loss goes on falling, on another path.

Over the same ranks the step that follows has the bits of the uninterrupted run, drawn dropout
masks included. Over other ranks, or under another wrapper, parameters and state have the bits that
were saved, and the step that follows is held to one process and to AdamW's formula from that state
(docs/theory/sharding.md). An exported value is the master parameter rounded once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fixtures.check import Check
from fixtures.distributed import wrapping as wrappers
from fixtures.distributed.ranks import RunRanks
from fixtures.distributed.wrapping import Tensors, Wrapping
from fixtures.golden import LoadTruth
from fixtures.numerics.formats import BF16, FP16, Format, round_to
from fixtures.training import wrapped_checkpoint as checkpoint
from fixtures.training.truth import StepTruth
from fixtures.training.wrapped_checks import (
    Whole,
    changed,
    check_agreement,
    check_clipping,
    check_mean,
    check_update,
)

WRAPPINGS = {
    "one-process": Wrapping("none"),
    "ddp": Wrapping("ddp"),
    "fully_shard": Wrapping("fully_shard"),
    "fully_shard-2x2": Wrapping("fully_shard", replicas=2),
    "fsdp1": Wrapping("fsdp1"),
    "fsdp1-flat": Wrapping("fsdp1", flat=True),
    "fsdp1-hybrid-2x2": Wrapping("fsdp1", "HYBRID_SHARD", replicas=2),
    "fsdp1-no-shard": Wrapping("fsdp1", "NO_SHARD"),
}
# Saved by a wrapper over so many ranks: loaded by others.
RESHARDED = {
    ("fully_shard", 4): [
        ("fully_shard", 2),
        ("fully_shard", 3),
        ("one-process", 1),
        ("ddp", 2),
        ("fsdp1", 2),
        ("fully_shard-2x2", 4),
    ],
    ("ddp", 2): [("fully_shard", 3)],
    ("fully_shard-2x2", 4): [("fully_shard", 2)],
    ("fsdp1", 2): [("fsdp1", 3), ("one-process", 1)],
    ("fsdp1-flat", 2): [("fsdp1-flat", 3)],
    ("fsdp1-hybrid-2x2", 4): [("fully_shard", 2)],
    ("fsdp1-no-shard", 2): [("ddp", 2)],
    ("one-process", 1): [("fully_shard", 2)],
}


def other(parameters: Tensors) -> Tensors:
    """Where a run starts that is to load all it needs."""
    return {name: value / 2 for name, value in parameters.items()}


@pytest.mark.parametrize(
    ("implementation", "world_size"),
    [
        pytest.param(*saved, marks=pytest.mark.takes_ranks(max(w for _, w in loaded)))
        for saved, loaded in RESHARDED.items()
    ],
    ids=[f"{name}-w{w}" for name, w in RESHARDED],
)
def test_training_goes_on(
    check: Check,
    truth: LoadTruth,
    ranks: RunRanks,
    tmp_path: Path,
    implementation: str,
    world_size: int,
) -> None:
    step, folder = StepTruth.load(truth), str(tmp_path)
    wrapping, batches = WRAPPINGS[implementation], step.micro_batches
    saving = (wrapping, step.parameters, batches, folder)
    saved, after = zip(*ranks(checkpoint.interrupted, world_size, *saving), strict=True)
    loading = (wrapping, other(step.parameters), batches, folder)
    loaded, resumed = zip(*ranks(checkpoint.resumed, world_size, *loading), strict=True)
    for name, want, got in (("loaded", saved, loaded), ("resumed", after, resumed)):
        odd = changed(wrappers.copies_of(want), wrappers.copies_of(got))
        check.exact(odd, [], name=name)
        check.exact([m.scaler for m in got], [m.scaler for m in want], name=f"{name}-scaler")
    for target, size in RESHARDED[implementation, world_size]:
        loading = (WRAPPINGS[target], *loading[1:])
        moments, steps = zip(*ranks(checkpoint.resharded, size, *loading), strict=True)
        check_resharded(check, saved, moments, steps, WRAPPINGS[target], f"{target}-w{size}")


def check_resharded(
    check: Check,
    saved: tuple[checkpoint.Moment, ...],
    loaded: tuple[checkpoint.Moment, ...],
    steps: tuple[checkpoint.Step, ...],
    wrapping: Wrapping,
    name: str,
) -> None:
    """The state has the bits that were saved, on all ranks, and the next step starts from it."""
    before = wrappers.copies_of(saved)[0]
    copies = wrappers.copies_of(loaded)
    check.exact(changed([before] * len(copies), copies), [], name=f"{name}-loaded")
    scalers = [saved[0].scaler] * len(loaded)
    check.exact([moment.scaler for moment in loaded], scalers, name=f"{name}-scaler")
    step, names = Whole.of(steps), list(before["parameter"])
    check_agreement(check, step, name)
    check_mean(check, step, names, len(steps), wrapping, False, name)
    check_clipping(check, step, names, name)
    check_update(check, before, step, names, checkpoint.STEPS + 1, name)


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("implementation", ["ddp", "fully_shard", "fsdp1", "fsdp1-flat"])
def test_export_rounds_each_parameter_once(
    check: Check,
    truth: LoadTruth,
    ranks: RunRanks,
    tmp_path: Path,
    implementation: str,
    fmt: Format,
) -> None:
    """From float32, though the ranks compute in bf16; and 16 bit to float32 and back is exact."""
    step, path = StepTruth.load(truth), tmp_path / "exported.safetensors"
    wrapping = Wrapping(**{**vars(WRAPPINGS[implementation]), "param_dtype": torch.bfloat16})
    inputs = (wrapping, step.parameters, step.micro_batches, fmt.dtype, str(path))
    master = wrappers.copies_of(ranks(checkpoint.exported, 2, *inputs))[0]["parameter"]
    written = load_file(path)
    check.exact(sorted(written), sorted(master), name="names")
    for name, value in master.items():
        case = name.replace(".", "-")
        check.exact(written[name], round_to(value.double(), fmt).to(fmt.dtype), name=case)
        again = written[name].float().to(fmt.dtype)
        check.exact(again, written[name], name=f"{case}-again")
