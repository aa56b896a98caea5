"""Activation checkpointing: backward recomputes what forward did not keep, bit for bit.

What goes wrong: dropout draws another mask in the recomputation; the recomputation runs without the
autocast of the forward pass, or in 16 bit; weights that changed in between are used silently.
A statistic of norms does not see it: with another dropout mask the gradient is wrong by 62 %, and
the standard deviation of its norm stays (ratio 0.997). So tensors are compared.

Theorem: the recomputation runs the same operations on the same operands, so its bits are the same:
the bound is 0. Exceptions are state that a forward pass changes: a batch norm counts it twice.

Truth: gradients of a network with integer weights, by integer arithmetic; exact in fp32.

Claims of the ledger: 53 (recomputation reads fp16 for fp32 activations: gradients are equal bits in
every format), 54 (std of the gradient norm +47 %: ratio 1.000; only preserve_rng_state=False does
harm), 55 (use_reentrant=False for nested autocast: both restore it; the reason for False is that
reentrant needs an input with a gradient), 56 (batch norm counts twice; changed weights).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fixtures import compiling
from fixtures.check import Check
from fixtures.collection import exists
from fixtures.devices import Device
from fixtures.distributed import sharding
from fixtures.distributed.ranks import Rank, RunRanks
from fixtures.examples import examples
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from fixtures.switches import intra_op_threads
from fixtures.training import flow, philox
from fixtures.training.framework import isolate
from fixtures.training.reference import REFERENCE
from fixtures.training.step import MicroBatch, Training, build
from fixtures.training.truth import CONFIG, StepTruth

# --- golden cases -------------------------------------------------------------------------------

SHAPES = {"x": (6, 5), "w1": (7, 5), "w2": (3, 7), "upstream": (6, 3)}


def integer_truth() -> Truth:
    """Gradients of sum(upstream * (relu(x w1^T)^2 w2^T)) by int64 arithmetic; all below 2^24."""
    numbers = {
        name: np.floor(philox.uniform(3, name, shape) * 3.5 + 0.5).astype(np.int64)
        for name, shape in SHAPES.items()
    }
    x, w1, w2, upstream = numbers.values()
    hidden = np.maximum(x @ w1.T, 0)
    before = 2 * hidden * (upstream @ w2)
    gradients = {"x": before @ w1, "w1": before.T @ x, "w2": upstream.T @ (hidden * hidden)}
    return Truth(
        {name: torch.from_numpy(value).float() for name, value in numbers.items()},
        {name: torch.from_numpy(value).float() for name, value in gradients.items()},
    )


GOLDEN = (
    Golden(
        node="checkpoint_recompute",
        name="integers",
        generate=integer_truth,
        arguments={},
        precision="integer arithmetic, exact",
        bound="exact",
        uses=(philox,),
    ),
)


# --- the operation --------------------------------------------------------------------------------

Function = Callable[[Tensor], Tensor]
Checkpointed = Callable[[Function, Tensor], Tensor]


def plain(function: Function, x: Tensor) -> Tensor:
    return function(x)


def reentrant(function: Function, x: Tensor) -> Tensor:
    result: Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True)
    return result


def non_reentrant(function: Function, x: Tensor) -> Tensor:
    result: Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
    return result


def nested(function: Function, x: Tensor) -> Tensor:
    return non_reentrant(partial(non_reentrant, function), x)


def whole(function: Function, x: Tensor) -> Tensor:
    """The recomputation runs to its end, not only to the last tensor that backward needs."""
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return non_reentrant(function, x)


def selective(function: Function, x: Tensor) -> Tensor:
    """Products are kept, all else is recomputed."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, kept)
    result: Tensor = torch.utils.checkpoint.checkpoint(
        function, x, use_reentrant=False, context_fn=contexts
    )
    return result


def sequential(function: Function, x: Tensor) -> Tensor:
    result: Tensor = torch.utils.checkpoint.checkpoint_sequential(
        [function, nn.Identity()], 2, x, use_reentrant=False
    )
    return result


VARIANTS: dict[str, Checkpointed] = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "nested": nested,
    "whole": whole,
    "selective": selective,
    "sequential": sequential,
}
variants = pytest.mark.parametrize("implementation", VARIANTS)
formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)


def blocks(
    width: int, inner: int, probability: float, device: Device, fmt: Format
) -> nn.Sequential:
    """Two of projections, norm, GELU and dropout; no generator of torch draws the weights.

    Not one block twice: autocast casts a shared weight once, which reentrant recomputation undoes.
    """
    model = nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, inner),
                nn.LayerNorm(inner),
                nn.GELU(),
                nn.Dropout(probability),
                nn.Linear(inner, width),
                nn.Dropout(probability),
            )
            for _ in range(2)
        )
    )
    for name, parameter in model.named_parameters():
        values = philox.uniform(17, f"block {name}", tuple(parameter.shape))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
    return model.to(device.torch, fmt.dtype)


def step(
    model: nn.Sequential, checkpointed: Checkpointed, rows: int, width: int, seed: int = 0
) -> Tensor:
    """Output, gradients of input and parameters, and two draws that follow, in one row.

    NaN where a gradient is missing.
    """
    parameter = next(model.parameters())
    x = torch.from_numpy(philox.uniform(23, "x", (rows, width))).to(parameter)
    x.requires_grad_()
    torch.manual_seed(seed)
    y = x
    for part in model:  # the last one's recomputation comes first
        # A part gets what it would outside of autocast: in 16 bit, one that loses autocast crashes
        # on its fp32 weights, and nobody has to look at values.
        y = checkpointed(part, y).to(x.dtype)
    autocast = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
        (y.float() ** 2).sum().backward()
    gradients = [
        torch.full_like(leaf, torch.nan) if leaf.grad is None else leaf.grad
        for leaf in (x, *model.parameters())
    ]
    after = torch.rand(2, device=x.device)
    parts = [y, *gradients, after]
    for parameter in model.parameters():
        parameter.grad = None
    return torch.cat([part.detach().flatten().double() for part in parts])


# --- promise: bound -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["reentrant", "non-reentrant"])
class TestBound:
    """The bound is 0, for whatever shape, dropout and seed can be found."""

    @examples(25)
    @given(
        rows=st.integers(1, 20),
        width=st.integers(1, 40),
        inner=st.integers(2, 40),
        probability=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
        seed=st.integers(0, 2**32),
    )
    def test_gradients_are_those_without(
        self,
        check: Check,
        device: Device,
        implementation: str,
        rows: int,
        width: int,
        inner: int,
        probability: float,
        seed: int,
    ) -> None:
        model = blocks(width, inner, probability, device, FP32)
        want = step(model, plain, rows, width, seed)
        check.exact(step(model, VARIANTS[implementation], rows, width, seed), want)


# --- promise: op --------------------------------------------------------------------------------


class TestOp:
    @pytest.mark.sentinel
    @variants
    def test_gradients_of_integers(
        self, check: Check, truth: LoadTruth, device: Device, implementation: str
    ) -> None:
        case = truth("integers")
        leaves = {
            name: value.to(device.torch, copy=True).requires_grad_(name != "upstream")
            for name, value in case.inputs.items()
        }
        x, w1, w2, upstream = (leaves[name] for name in SHAPES)

        def function(x: Tensor) -> Tensor:
            return (x @ w1.mT).relu().square() @ w2.mT

        VARIANTS[implementation](function, x).backward(upstream)
        for name, want in case.values.items():
            gradient = leaves[name].grad
            assert gradient is not None
            check.exact(gradient.cpu() + 0.0, want + 0.0, name=name, inputs=case.digest)

    @pytest.mark.parametrize("probability", [0.0, 0.1], ids=lambda p: f"p{p:g}")
    @exists(lambda device, threads: device.type == "cpu" or threads == 1)
    @pytest.mark.parametrize("threads", [1, 2], ids=lambda n: f"threads{n}")
    @variants
    @formats
    def test_gradients_are_those_without(
        self,
        check: Check,
        device: Device,
        fmt: Format,
        implementation: str,
        threads: int,
        probability: float,
    ) -> None:
        """Output, all gradients and the draws that follow: the generator is where it would be."""
        model = blocks(24, 33, probability, device, fmt)
        with intra_op_threads(threads):
            want = step(model, plain, 19, 24)
            check.exact(step(model, VARIANTS[implementation], 19, 24), want)

    @pytest.mark.parametrize("low", [BF16, FP16], ids=lambda fmt: fmt.name)
    @variants
    def test_recomputes_under_the_autocast_of_forward(
        self, check: Check, device: Device, implementation: str, low: Format
    ) -> None:
        """Backward runs outside of it."""
        model = blocks(24, 33, 0.1, device, FP32)
        got = []
        for checkpointed in (plain, VARIANTS[implementation]):
            with torch.autocast(device.torch.type, low.dtype):
                got.append(step(model, checkpointed, 19, 24))
        check.exact(int(got[1].isnan().sum()), 0, name="elements-without-gradient")
        check.exact(got[1], got[0])

    def test_weights_get_gradients_though_no_input_does(self, check: Check, device: Device) -> None:
        """Without reentry; reentrant ones refuse."""
        model = blocks(5, 7, 0.0, device, FP32)
        x = torch.from_numpy(philox.uniform(23, "x", (3, 5))).to(device.torch, torch.float32)
        grads = []
        for checkpointed in (plain, non_reentrant):
            model.zero_grad()
            checkpointed(model, x).sum().backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            grads.append(torch.cat(parts).cpu())
        check.exact(grads[1], grads[0])
        check.raises(RuntimeError, lambda: reentrant(model, x).sum().backward(), name="reentrant")

    @pytest.mark.parametrize("implementation", ["reentrant", "non-reentrant"])
    def test_batch_norm_counts_the_recomputation(
        self, check: Check, device: Device, implementation: str
    ) -> None:
        """Gradients are unharmed; running statistics are those of two forward passes."""
        got = []
        for checkpointed in (plain, VARIANTS[implementation]):
            norm = nn.BatchNorm1d(6).to(device.torch)
            model = nn.Sequential(norm, nn.GELU(), nn.Linear(6, 2, device=device.torch))
            nn.init.constant_(model[2].weight, 0.5)
            nn.init.zeros_(model[2].bias)
            x = torch.from_numpy(philox.uniform(23, "x", (9, 6))).to(device.torch, torch.float32)
            x.requires_grad_()
            checkpointed(model, x)[:, 0].square().sum().backward()
            assert x.grad is not None
            if checkpointed is plain:
                with torch.no_grad():
                    model(x)
            got.append((x.grad.cpu(), norm.running_mean.cpu(), int(norm.num_batches_tracked)))
        check.exact(got[1][0], got[0][0], name="gradient")
        check.exact(got[1][1], got[0][1], name="mean")
        check.exact(got[1][2], 2, name="count")

    @pytest.mark.parametrize("implementation", ["plain", "reentrant", "non-reentrant"])
    def test_changed_weights_are_detected(
        self, check: Check, device: Device, implementation: str
    ) -> None:
        """Between forward and backward: autograd refuses, by the version of what it kept."""
        model = blocks(5, 7, 0.0, device, FP32)
        x = torch.ones(3, 5, device=device.torch, requires_grad=True)
        y = {"plain": plain, **VARIANTS}[implementation](model, x)
        with torch.no_grad():
            model[0][4].weight.mul_(2.0)
        check.raises(RuntimeError, lambda: y.sum().backward())

    @pytest.mark.compiled
    def test_compiled_recomputation_keeps_the_mask(self, check: Check, device: Device) -> None:
        """The gradient of dropout is its mask: not 0 exactly where the output is not."""

        def function(x: Tensor) -> Tensor:
            return non_reentrant(lambda t: nn.functional.dropout(t.cos().cos(), 0.5), x)

        torch.manual_seed(0)
        x = torch.full((1000,), 0.75, device=device.torch, requires_grad=True)
        y = compiling.compiled(function)(x)
        y.sum().backward()
        assert x.grad is not None
        check.exact((x.grad != 0).cpu().int(), (y != 0).cpu().int())
        check.exact(0 < int((y == 0).sum()) < 1000, True, name="drops")


# --- promise: flow ------------------------------------------------------------------------------


def gradients(
    rank: Rank, checkpointed: bool, parameters: dict[str, Tensor], batches: list[MicroBatch]
) -> dict[str, Tensor]:
    """Of the float64 step with or without checkpoints, over fully_shard where there are ranks."""
    ops = isolate("checkpoint_recompute", torch.float64) if checkpointed else REFERENCE
    model = build(CONFIG, ops, rank.device, parameters=parameters)
    blocks: list[nn.Module] = list(model.blocks)
    if rank.world_size > 1:
        sharding.shard(model, blocks=blocks, rank=rank)
    training = Training(model, ops, CONFIG, rank.device)
    total = sum(batch.valid for batch in batches)
    mine = [batch.shard(rank.index, rank.world_size).to(rank.device) for batch in batches]
    training.gradients(mine, valid_total=total, ranks=rank.world_size)
    return sharding.full_gradients(model)


def in_a_row(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


class TestFlow:
    """Each block is checkpointed: gradients with it are those without, bit for bit."""

    @pytest.mark.parametrize("fmt", [FP64], ids=lambda fmt: fmt.name)
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        data = StepTruth.load(truth)
        alone = Rank(0, 1, device.torch)
        arguments = (data.parameters, data.micro_batches)
        without, with_ = (gradients(alone, on, *arguments) for on in (False, True))
        check.exact(in_a_row(with_), in_a_row(without), name="as-without")
        flow.check_one_process(check, truth, "checkpoint_recompute", fmt, device.torch)

    @pytest.mark.parametrize("fmt", [FP64], ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        data = StepTruth.load(truth)
        arguments: tuple[Any, ...] = (data.parameters, data.micro_batches)
        without, with_ = (ranks(gradients, world_size, on, *arguments) for on in (False, True))
        for rank in range(world_size):
            check.exact(in_a_row(with_[rank]), in_a_row(without[rank]), name=f"rank{rank}")
        job = flow.fully_sharded
        flow.check_ranks(check, truth, ranks, job, world_size, "checkpoint_recompute", fmt)
