"""Dropout: a random mask, and x/(1 - p) where it keeps.

What goes wrong: backward uses another mask than forward; the mask is drawn in 16 bit, so that the
keep rate is off; the rescale is forgotten, or p taken for 1 - p; a recomputed forward, an eval pass
or a compiled graph draws what it should not.

Theorem: kept values err by the roundings of the factor 1/(1 - p) and of one product (Higham,
Accuracy and Stability, Lemma 3.1); the stored factor is a chain of IEEE roundings, so exact. Counts
in a mask of independent draws follow binomial laws: kept elements, windows of k all kept or all
dropped, disjoint pairs at a lag that agree. Limits are exact quantiles at a false alarm of 1e-12
each, under 1e-9 for all; derivations in docs/theory/dropout_mask.md.

Truth: on the CPU the mask itself, from numpy's mt19937 (fixtures.numerics.mt19937_bernoulli): two
words per element in memory order, so it cannot depend on dtype, size, threads or instruction set.
CUDA draws by Philox; those masks are held to the laws, not yet to a prediction.

Claims of the ledger: 77 (bf16 masks "drift": the mask is bitwise that of fp32; what bf16 changes is
the factor, at p = 0.1 1.109375, 0.16 % low; a mask compared in bf16 keeps 0.898), 79 (loss spread
repaired by another mask: nothing to repair), 80 (compiled masks change with start time: without
fallback_random they differ from eager ones, no more), 103 (what fixes the mask: the draws before).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fixtures import compiling
from fixtures.check import Check
from fixtures.collection import exists
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import dropout_bounds, mt19937_bernoulli, references
from fixtures.numerics.bounds import stored_reference
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from fixtures.training import drawn_dropout

SEED = 31_415
PROBABILITIES = (0.001, 0.1, 0.3, 0.5, 0.9)
SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 4099)  # around vector widths; odd ones
LARGEST, DRAWS = max(SIZES), 2**20  # of a mask, of one for the laws

formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
probabilities = pytest.mark.parametrize("p", PROBABILITIES, ids=lambda p: f"p{p:g}")


# --- golden cases -------------------------------------------------------------------------------


def mask_truth() -> Truth:
    """Per p, which of the first elements after ``torch.manual_seed(SEED)`` are kept."""
    masks = {
        f"p{p:g}": torch.from_numpy(mt19937_bernoulli.keep(SEED, LARGEST, p)) for p in PROBABILITIES
    }
    return Truth(inputs={"seed": torch.tensor(SEED)}, values=masks)


def value_truth() -> Truth:
    """x/(1 - p) of numbers that bf16 and fp16 hold as well, none of which overflows in fp16."""
    raw = np.random.Philox(key=SEED).random_raw(LARGEST)
    sign = 1.0 - 2.0 * (raw >> np.uint64(63)).astype(np.float64)
    significand = 1.0 + (raw & np.uint64(127)).astype(np.float64) / 128
    exponent = (raw >> np.uint64(24)) % np.uint64(20)
    x = sign * significand * 2.0 ** (exponent.astype(np.float64) - 10.0)
    values = {}
    for p in PROBABILITIES:
        exact = partial(_divided_mp, p=p)
        rounded = references.round_once(lambda t, p=p: t / (1.0 - p), exact, x, 2.0)
        values[f"p{p:g}"] = torch.from_numpy(rounded)
    return Truth(inputs={"x": torch.from_numpy(x).float()}, values=values)


def _divided_mp(x: Any, p: float) -> Any:
    return x / (1 - mpmath.mpf(p))


GOLDEN = (
    Golden(
        node="dropout_mask",
        name="mt19937",
        generate=mask_truth,
        arguments={},
        precision="integers of numpy's mt19937; float64 comparison",
        bound="exact",
        uses=(mt19937_bernoulli,),
    ),
    Golden(
        node="dropout_mask",
        name="values",
        generate=value_truth,
        arguments={},
        precision="float64, rounded once to fp32 (Ziv; mpmath, 50 digits)",
        bound="x / (1 - p) + rounding",
        uses=(_divided_mp, references),
    ),
)


# --- implementations ----------------------------------------------------------------------------

Operation = Callable[[Tensor, float], Tensor]


def eager(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p)


def inplace(x: Tensor, p: float) -> Tensor:
    return F.dropout(x.clone(), p, inplace=True)


def module(x: Tensor, p: float) -> Tensor:
    return nn.Dropout(p)(x)


def native(x: Tensor, p: float) -> Tensor:
    """The fused form, which autograd on CUDA and the compiler use: a mask of its own, returned."""
    return torch.native_dropout(x, p, True)[0]


def compiled(x: Tensor, p: float) -> Tensor:
    return compiling.compiled(eager)(x, p)


IMPLEMENTATIONS = [pytest.param(f, id=f.__name__) for f in (eager, inplace, module, native)]
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def seeded(operation: Operation, x: Tensor, p: float) -> Tensor:
    torch.manual_seed(SEED)
    return operation(x, p)


def ones(device: Device, fmt: Format, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=fmt.dtype, device=device.torch)


def state_of(device: Device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device.torch).get_rng_state(device.torch)
    return state


def channels(dims: int) -> Operation:
    def dropout(x: Tensor, p: float) -> Tensor:
        result: Tensor = getattr(F, f"dropout{dims}d")(x, p)
        return result

    return dropout


# By name: the operation, and an input of ones in a layout of its own.
LAYOUTS: dict[str, tuple[Operation, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "transposed": (eager, lambda x: x.t(), (33, 65)),
    "permuted": (eager, lambda x: x.permute(2, 0, 1), (8, 16, 5)),
    "every-other-column": (eager, lambda x: x[:, ::2], (40, 64)),
    "rows-skipped": (eager, lambda x: x[::2], (40, 65)),
    "channels-last": (eager, lambda x: x.to(memory_format=torch.channels_last), (2, 6, 5, 7)),
    "dropout1d": (channels(1), lambda x: x, (4, 6, 5)),
    "dropout2d": (channels(2), lambda x: x.transpose(0, 1), (4, 6, 5, 3)),
    "dropout3d": (channels(3), lambda x: x, (4, 6, 5, 3, 2)),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
# On the CPU; the Philox masks of CUDA are predicted by hardware_models, for grids that are known.
drawn_by_mt19937 = exists(lambda device: device.type == "cpu")


# --- promise: bound -----------------------------------------------------------------------------


def check_counts(check: Check, y: Tensor, p: float) -> None:
    found = dropout_bounds.counts_of(y.cpu() != 0, p)
    want, bound = dropout_bounds.binomial(found)
    check.within(found.counts, want, bound, where=lambda index: found.names[index[0]])


class TestBound:
    @formats
    @given(
        values=st.lists(st.floats(-1000, 1000, width=16), min_size=1, max_size=40),
        p=st.sampled_from([*PROBABILITIES, 0.15, 0.25, 1 / 3]) | st.floats(0.001, 0.95),
    )
    def test_kept_values(
        self, check: Check, device: Device, fmt: Format, values: list[float], p: float
    ) -> None:
        x = torch.tensor(values, dtype=torch.float64).to(fmt.dtype)
        keep = seeded(eager, ones(device, fmt, len(values)), p).cpu() != 0
        want = x.double() * keep / (1.0 - p)
        got = seeded(eager, x.to(device.torch), p).cpu()
        check.within(got, want, dropout_bounds.rescaled(want, fmt))

    @formats
    @probabilities
    def test_counts_follow_their_laws(
        self, check: Check, device: Device, fmt: Format, p: float
    ) -> None:
        """How many are kept, in a row kept or dropped, equal at a distance: nothing is too much."""
        check_counts(check, seeded(eager, ones(device, fmt, DRAWS), p), p)

    @pytest.mark.compiled
    def test_counts_of_a_compiled_mask(self, check: Check, device: Device) -> None:
        """The compiler draws by a generator of its own."""
        check_counts(check, seeded(compiled, ones(device, FP32, DRAWS), 0.1), 0.1)


# --- promise: op --------------------------------------------------------------------------------


class TestOp:
    @pytest.mark.sentinel
    @drawn_by_mt19937
    @all_implementations
    @probabilities
    @formats
    def test_mask_is_that_of_mt19937(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        p: float,
        implementation: Operation,
    ) -> None:
        """Every size, from the same seed, the beginning of one and the same mask."""
        case = truth("mt19937")
        masks = [seeded(implementation, ones(device, fmt, size), p) != 0 for size in SIZES]
        want = torch.cat([case.values[f"p{p:g}"][:size] for size in SIZES])
        check.exact(torch.cat(masks), want, inputs=case.digest)

    @drawn_by_mt19937
    @formats
    @layouts
    def test_mask_follows_memory(
        self, check: Check, device: Device, fmt: Format, layout: str
    ) -> None:
        operation, arrange, shape = LAYOUTS[layout]
        x = arrange(ones(device, fmt, *shape))
        by_channel = layout.startswith("dropout")
        predict = mt19937_bernoulli.channel_mask_of if by_channel else mt19937_bernoulli.mask_of
        check.exact(seeded(operation, x, 0.3) != 0, predict(x, SEED, 0.3))

    @drawn_by_mt19937
    def test_threads_do_not_matter(self, check: Check, device: Device) -> None:
        size, threads = 2**17, torch.get_num_threads()
        want = torch.from_numpy(mt19937_bernoulli.keep(SEED, size, 0.1))
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                mask = seeded(eager, ones(device, FP32, size), 0.1) != 0
                check.exact(mask, want, name=f"{count}-threads")
        finally:
            torch.set_num_threads(threads)

    @all_implementations
    @probabilities
    @formats
    def test_stored_factor(
        self, check: Check, device: Device, fmt: Format, p: float, implementation: Operation
    ) -> None:
        """1/(1 - p) rounded to the format: in 16 bit the mean of the output is off by a known
        share, which is recorded."""
        got = seeded(implementation, ones(device, fmt, LARGEST), p).unique().tolist()
        factor = dropout_bounds.stored_factor(p, fmt)
        check.exact(got, [0.0, factor])
        check.observe(factor * (1.0 - p) - 1.0, name="bias-of-the-mean")

    @all_implementations
    @probabilities
    @formats
    def test_forward_and_gradient(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        p: float,
        implementation: Operation,
    ) -> None:
        """x/(1 - p) under the mask, dy/(1 - p) under the same one."""
        case = truth("values")
        x = case.inputs["x"].to(device.torch, fmt.dtype).requires_grad_()
        keep = seeded(implementation, ones(device, fmt, LARGEST), p).cpu() != 0
        y = seeded(implementation, x, p)
        (gradient,) = torch.autograd.grad(y, x, x.detach())
        want = case.values[f"p{p:g}"] * keep
        bound = dropout_bounds.rescaled(want, fmt) + stored_reference(want)
        check.within(y.cpu(), want, bound, name="forward", inputs=case.digest)
        check.within(gradient.cpu(), want, bound, name="gradient", inputs=case.digest)

    @formats
    def test_train_eval_train(self, check: Check, device: Device, fmt: Format) -> None:
        """Evaluation is the identity and draws nothing; training goes on where it was."""
        layer, x = nn.Dropout(0.3), ones(device, fmt, LARGEST)
        first, second = seeded(eager, x, 0.3), eager(x, 0.3)
        torch.manual_seed(SEED)
        before, state = layer(x), state_of(device)
        noisy = torch.linspace(-1, 1, LARGEST, device=device.torch).to(fmt.dtype)
        evaluated = layer.eval()(noisy)
        check.exact(evaluated, noisy, name="evaluation")
        check.exact(state_of(device), state, name="nothing-drawn")
        check.exact(before, first, name="before")
        check.exact(layer.train()(x), second, name="after")
        check.exact(torch.equal(first, second), False, name="masks-differ")

    @pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
    @formats
    def test_recomputed_forward_redraws_nothing(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format, reentrant: bool
    ) -> None:
        x = truth("values").inputs["x"].to(device.torch, fmt.dtype)

        def block(t: Tensor) -> Tensor:
            return F.dropout(F.dropout(t * t, 0.3), 0.1)

        def recomputed(t: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(block, t, use_reentrant=reentrant)
            return result

        found = []
        for function in (block, recomputed):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(SEED)
            function(leaf).backward(x)
            found.append((leaf.grad, state_of(device)))
        check.exact(found[1][0], found[0][0], name="gradient")
        check.exact(found[1][1], found[0][1], name="generator")

    @formats
    def test_ends_of_the_range(self, check: Check, device: Device, fmt: Format) -> None:
        """p = 0 is the identity, p = 1 is 0; neither draws. Beyond, p is refused."""
        x = torch.linspace(-3, 3, 99, device=device.torch).to(fmt.dtype)
        state = state_of(device)
        check.exact(F.dropout(x, 0.0), x, name="p0")
        check.exact(F.dropout(x, 1.0).abs(), torch.zeros_like(x), name="p1")
        check.exact(state_of(device), state, name="nothing-drawn")
        for p in (-0.1, 1.1):
            check.raises(ValueError, partial(F.dropout, x, p), name=f"p{p:g}")

    @all_implementations
    @formats
    def test_nan_in_nan_out(
        self, check: Check, device: Device, fmt: Format, implementation: Operation
    ) -> None:
        """Dropped or kept: 0 times NaN is NaN, so that a mask hides none."""
        x = torch.full((64,), float("nan"), dtype=fmt.dtype, device=device.torch)
        check.exact(seeded(implementation, x, 0.5).isnan().all().item(), True)

    @pytest.mark.compiled
    @layouts
    def test_compiled_mask_is_the_eager_one(
        self, check: Check, device: Device, layout: str
    ) -> None:
        """With inductor's fallback_random, by element and by channel."""
        from torch._inductor import config

        operation, arrange, shape = LAYOUTS[layout]
        x = arrange(ones(device, FP32, *shape))
        with config.patch(fallback_random=True):
            got = seeded(compiling.compiled(operation), x, 0.3)
        check.exact(got != 0, seeded(operation, x, 0.3) != 0)

    @pytest.mark.compiled
    def test_compiled_backward_has_the_mask_of_forward(self, check: Check, device: Device) -> None:
        x = ones(device, FP32, LARGEST).requires_grad_()
        y = seeded(compiled, x, 0.3)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(x))
        check.exact(gradient, y.detach())


# --- promise: flow ------------------------------------------------------------------------------


class TestFlow:
    """F.dropout draws its own masks; the truth is the float64 step under the masks recovered."""

    @formats
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        drawn_dropout.check_one_process(check, truth, fmt, device.torch)

    @formats
    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        """Each rank draws from a stream of its own."""
        drawn_dropout.check_ranks(check, truth, ranks, world_size, fmt)
