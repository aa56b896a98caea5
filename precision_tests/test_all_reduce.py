"""All-reduce: the sum of gradients over ranks, its order and format, and what NaN does to it.

What goes wrong: a sum is taken for a mean; the reduction runs in bf16; a NaN is lost or replaced;
a rank is left out; the norm that clips is a local one.

Theorem: whatever the order of the W - 1 additions, |err| <= gamma_(W-1) sum_r |x_r| with the unit
roundoff of the format in which partial sums are kept (Higham, Accuracy and Stability, (4.4)). A
ring re-rounds a 16-bit partial sum at every hop, so u is that of 16 bit there.

Truth: sums of random 16- and 32-bit patterns in exact rational arithmetic, rounded once to fp32.

MAX and MIN may lose a NaN (on gloo it can depend on which rank begins the chunk), so finite flags
travel as counts: test_finite_flags_are_counted.

Claims of the ledger: 10 (bits depend on the chunk an element falls into), 35 and 36 (no dirty read,
no effect of arrival time; a barrier changes timing only), 37 and 38 (NCCL_ASYNC_ERROR_HANDLING and
NCCL_IB_DISABLE do not enter values), 39 (the order), 89 (a NaN reaches all ranks through SUM), 90
(the one real effect of W is overflow of fp16 sums), 91 (clipping needs the global norm; it is no
hook).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fixtures.check import Check
from fixtures.distributed import sharding
from fixtures.distributed.ranks import Rank, RunRanks, unless_refused
from fixtures.examples import examples
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import bounds, references
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import BF16, FORMATS, FP16, FP32, Format, from_bits, round_to
from fixtures.training import flow
from fixtures.training.integers import integer_layers, integer_rows

WORLD_SIZES = (2, 3, 4)
LARGEST = max(WORLD_SIZES)
COUNTS = {"bf16": 4_000, "fp16": 25_000, "fp32": 4_000}  # per rank: 10^5 fp16 values in all

formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES, ids=lambda w: f"w{w}")


# --- golden cases -------------------------------------------------------------------------------


def random_values(fmt: Format, count: int, key: int) -> Tensor:
    """Random signs, significands and exponents; small enough that no sum of 4 overflows.

    Bits come straight from Philox, whose raw stream numpy keeps for good. fp32 exponents stay near
    1, where additions round; 16-bit ones cover their whole range but the top.
    """
    width = 8 * fmt.dtype.itemsize
    raw = np.random.Philox(key=key).random_raw(count)
    exponents = 24 if fmt is FP32 else 2 ** (width - fmt.precision) - 4
    lowest = 127 - 12 if fmt is FP32 else 0
    significand = raw & np.uint64(2 ** (fmt.precision - 1) - 1)
    exponent = np.uint64(lowest) + (raw >> np.uint64(24)) % np.uint64(exponents)
    sign = (raw >> np.uint64(63)) << np.uint64(width - 1)
    bits = sign | (exponent << np.uint64(fmt.precision - 1)) | significand
    integers = bits.astype(np.uint32 if width == 32 else np.uint16)
    return from_bits(torch.from_numpy(integers.view(f"i{width // 8}").copy()), fmt.dtype)


def sum_truth(fmt: str) -> Truth:
    """Exact sums over the first 2, 3 and 4 ranks."""
    values = [random_values(FORMATS[fmt], COUNTS[fmt], key) for key in range(LARGEST)]
    sums = {
        f"w{w}": torch.from_numpy(references.exact_sum([v.double().numpy() for v in values[:w]]))
        for w in WORLD_SIZES
    }
    return Truth(inputs={f"rank{r}": v for r, v in enumerate(values)}, values=sums)


GOLDEN = tuple(
    Golden(
        node="all_reduce",
        name=f"sum-{fmt}",
        generate=sum_truth,
        arguments={"fmt": fmt},
        precision="exact rational arithmetic, rounded once to fp32",
        bound="gamma_(W-1)",
        uses=(random_values, references),
    )
    for fmt in COUNTS
)


# --- what the ranks do --------------------------------------------------------------------------


def reduce(rank: Rank, values: list[Tensor], op: str = "SUM", late: int | None = None) -> Tensor:
    """All-reduce of each rank's own tensor; ``late`` names a rank that arrives 30 ms after."""
    if late == rank.index:
        time.sleep(0.03)
    mine = values[rank.index].to(rank.device, copy=True)
    with unless_refused():  # gloo's AVG, say, before torch 2.13
        dist.all_reduce(mine, op=getattr(dist.ReduceOp, op))
    return mine.cpu()


def reduce_asynchronously(rank: Rank, values: list[Tensor]) -> Tensor:
    mine = values[rank.index].to(rank.device, copy=True)
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    work.wait()
    return mine.cpu()


def scatter(rank: Rank, values: list[Tensor]) -> Tensor:
    mine = values[rank.index].to(rank.device, copy=True)
    share = mine.new_empty(mine.numel() // rank.world_size)
    dist.reduce_scatter_tensor(share, mine)
    return share.cpu()


def gather(rank: Rank, values: list[Tensor]) -> Tensor:
    mine = values[rank.index].to(rank.device, copy=True)
    whole = mine.new_empty(mine.numel() * rank.world_size)
    dist.all_gather_into_tensor(whole, mine)
    return whole.cpu()


def clip(rank: Rank, wrapper: str, *, broken: bool = False) -> float | str:
    """The norm that clipping found, of a model with ``integer_layers``' weights on every rank and
    this rank's share of 12 rows; or the error it raised, for an inf in the last rank's."""
    model = WRAPPERS[wrapper](integer_layers().to(rank.device), rank)
    rows = integer_rows(12, 12)[rank.index :: rank.world_size].to(rank.device)
    if broken and rank.index == rank.world_size - 1:
        rows = rows * math.inf
    model(rows).sum().backward()
    if wrapper == "fsdp1-method":
        return float(model.clip_grad_norm_(1.0))
    try:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=broken)
    except RuntimeError as error:
        return type(error).__name__
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _ddp(model: nn.Module, rank: Rank) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fully_shard(model: nn.Module, rank: Rank) -> nn.Module:
    return sharding.shard(model, blocks=model.children(), rank=rank)


def _fsdp1(model: nn.Module, rank: Rank) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=rank.device, use_orig_params=True)


WRAPPERS: dict[str, Callable[[nn.Module, Rank], nn.Module]] = {
    "ddp": _ddp,
    "fully_shard": _fully_shard,
    "fsdp1-method": _fsdp1,
    "fsdp1-utils": _fsdp1,
}


# --- promise: bound -----------------------------------------------------------------------------


def magnitude(values: list[Tensor]) -> Tensor:
    return torch.stack([value.double().abs() for value in values]).sum(0)


def sum_bound(values: list[Tensor], fmt: Format) -> Bound:
    return bounds.ring_reduction(magnitude(values), len(values), fmt)


class TestBound:
    @formats
    @world_sizes
    @examples(20)
    @given(seed=st.integers(0, 2**32), spread=st.integers(0, 12))
    def test_sum(
        self, check: Check, ranks: RunRanks, fmt: Format, world_size: int, seed: int, spread: int
    ) -> None:
        """Values of both signs and of magnitudes up to 4^spread apart."""
        source = np.random.default_rng(seed)
        shape = (world_size, 257)
        drawn = source.uniform(-1, 1, shape) * 2.0 ** source.integers(-spread, spread + 1, shape)
        values = list(torch.from_numpy(drawn).to(fmt.dtype))
        want = torch.stack([value.double() for value in values]).sum(0)
        got = ranks(reduce, world_size, values)[0]
        check.within(got, want, sum_bound(values, fmt))

    @formats
    def test_two_ranks_round_once(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format
    ) -> None:
        """One addition is one rounding: the correctly rounded sum, bit for bit."""
        case = truth(f"sum-{fmt.name}")
        values = [case.inputs["rank0"], case.inputs["rank1"]]
        exact = values[0].double() + values[1].double()
        want = round_to(exact, fmt).to(fmt.dtype)
        check.exact(ranks(reduce, 2, values)[0] + 0.0, want + 0.0, inputs=case.digest)


# --- promise: op --------------------------------------------------------------------------------


def sample(fmt: Format, world_size: int, count: int = 1000) -> list[Tensor]:
    return [random_values(fmt, count, 100 + rank) for rank in range(world_size)]


class TestOp:
    @pytest.mark.sentinel
    @formats
    @world_sizes
    def test_sum(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        case = truth(f"sum-{fmt.name}")
        values = [case.inputs[f"rank{rank}"] for rank in range(world_size)]
        want = case.values[f"w{world_size}"]
        bound = sum_bound(values, fmt) + bounds.stored_reference(want)
        check.within(ranks(reduce, world_size, values)[0], want, bound, inputs=case.digest)

    @formats
    @world_sizes
    def test_average(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        """AVG is the sum over W, whether it divides or multiplies by 1/W, before or after."""
        case = truth(f"sum-{fmt.name}")
        values = [case.inputs[f"rank{rank}"] for rank in range(world_size)]
        want = case.values[f"w{world_size}"].double() / world_size
        bound = bounds.mean_reduction(magnitude(values), world_size, fmt)
        bound += bounds.stored_reference(want)
        check.within(ranks(reduce, world_size, values, "AVG")[0], want, bound, inputs=case.digest)

    @formats
    @world_sizes
    @pytest.mark.parametrize("special", ["nan", "inf", "-inf"])
    def test_nonfinite_reaches_every_rank(
        self, check: Check, ranks: RunRanks, fmt: Format, world_size: int, special: str
    ) -> None:
        """From any rank to all, at that element only. Rank r breaks element 7 r + 3."""
        values = sample(fmt, world_size, 64)
        for rank, value in enumerate(values):
            value[7 * rank + 3] = float(special)
        expected = [[7 * rank + 3, str(float(special))] for rank in range(world_size)]
        for rank, result in enumerate(ranks(reduce, world_size, values)):
            broken = (~torch.isfinite(result)).nonzero().flatten().tolist()
            got = [[index, str(float(result[index]))] for index in broken]
            check.exact(got, expected, name=f"rank{rank}")

    @world_sizes
    def test_finite_flags_are_counted(self, check: Check, ranks: RunRanks, world_size: int) -> None:
        """Whether anyone overflowed, by a sum of 0/1: it cannot be lost as MAX loses a NaN."""
        flags = [torch.tensor([rank % 2, 1, 0], dtype=torch.int32) for rank in range(world_size)]
        for rank, result in enumerate(ranks(reduce, world_size, flags)):
            check.exact(result.tolist(), [world_size // 2, world_size, 0], name=f"rank{rank}")

    @formats
    @world_sizes
    def test_ranks_repeats_arrival_and_wait_agree(
        self, check: Check, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        values = sample(fmt, world_size)
        first = ranks(reduce, world_size, values)
        for rank in range(1, world_size):
            check.exact(first[rank], first[0], name=f"rank{rank}")
        check.exact(ranks(reduce, world_size, values)[0], first[0], name="repeated")
        for late in range(world_size):
            again = ranks(reduce, world_size, values, late=late)[0]
            check.exact(again, first[0], name=f"late{late}")
        after_wait = ranks(reduce_asynchronously, world_size, values)[0]
        check.exact(after_wait, first[0], name="asynchronous")

    @pytest.mark.gpu_only
    @formats
    @world_sizes
    def test_sum_in_the_switch(
        self, check: Check, ranks_in_switch: RunRanks, fmt: Format, world_size: int
    ) -> None:
        """NCCL chooses, as in training; the message is long enough for NVLS where there is one."""
        values = sample(fmt, world_size, 2**22)
        want = torch.stack([value.double() for value in values]).sum(0)
        got = ranks_in_switch(reduce, world_size, values)[0]
        order = "a switch adds in an order that NCCL does not promise"
        check.within(got, want, sum_bound(values, fmt), not_repeatable=order)

    @pytest.mark.takes_ranks(4)
    def test_fp16_sum_overflows_unless_divided_first(self, check: Check, ranks: RunRanks) -> None:
        values = [torch.full((4,), 40000.0, dtype=torch.float16) for _ in range(4)]
        check.exact(ranks(reduce, 4, values)[0].tolist(), [math.inf] * 4, name="sum")
        divided = [value / 4 for value in values]
        check.exact(ranks(reduce, 4, divided)[0].tolist(), [40000.0] * 4, name="divided")

    @formats
    @world_sizes
    def test_reduce_scatter(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        case = truth(f"sum-{fmt.name}")
        size = 12 * (COUNTS[fmt.name] // 12)  # divides by every W
        values = [case.inputs[f"rank{rank}"][:size] for rank in range(world_size)]
        want = case.values[f"w{world_size}"][:size]
        bound = sum_bound(values, fmt) + bounds.stored_reference(want)
        got = torch.cat(ranks(scatter, world_size, values))
        check.within(got, want, bound, inputs=case.digest)

    @formats
    @world_sizes
    def test_all_gather_copies(
        self, check: Check, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        values = sample(fmt, world_size, 99)
        values[0][5], values[1][6] = math.nan, -math.inf
        for rank, result in enumerate(ranks(gather, world_size, values)):
            check.exact(result, torch.cat(values), name=f"rank{rank}")

    @world_sizes
    def test_order_of_summation(self, check: Check, ranks: RunRanks, world_size: int) -> None:
        """Which ranks are added first, found by probing and recorded: it may drift, not fail.

        With a large M at rank i, -M at rank j and 1 elsewhere, the ones added before M and -M meet
        are absorbed; the sum counts the others (arXiv 2411.00442). 61 elements show the chunks.
        """
        found = {}
        for i, j in itertools.combinations(range(world_size), 2):
            values = [torch.ones(61) for _ in range(world_size)]
            values[i], values[j] = torch.full((61,), 2.0**30), torch.full((61,), -(2.0**30))
            found[f"{i}{j}"] = "".join(str(int(n)) for n in ranks(reduce, world_size, values)[0])
        check.observe(found)

    @pytest.mark.parametrize("implementation", WRAPPERS)
    @world_sizes
    def test_clipping_sees_the_global_norm(
        self, check: Check, ranks: RunRanks, world_size: int, implementation: str
    ) -> None:
        """The norm is that of the mean over ranks of their rows' gradients, as in one process."""
        model = integer_layers()
        model(integer_rows(12, 12)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        want = (gradient.double() / world_size).norm().reshape(1)  # the gradient is exact
        norms = ranks(clip, world_size, implementation)
        check.exact([norm == norms[0] for norm in norms], [True] * world_size, name="ranks-agree")
        bound = bounds.norm2(want, gradient.numel(), FP32)
        check.within(torch.tensor(norms[:1]), want, bound, name="norm")

    @pytest.mark.parametrize("implementation", ["ddp", "fully_shard"])
    @world_sizes
    def test_clipping_raises_on_nonfinite_gradients(
        self, check: Check, ranks: RunRanks, world_size: int, implementation: str
    ) -> None:
        got = ranks(clip, world_size, implementation, broken=True)
        check.exact(got, ["RuntimeError"] * world_size)


# --- promise: flow ------------------------------------------------------------------------------


class TestFlow:
    """Gradients are float64; only their reduction over the ranks runs in the format."""

    @formats
    @world_sizes
    def test_data_parallel(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        flow.check_ranks(check, truth, ranks, flow.data_parallel, world_size, "all_reduce", fmt)

    @formats
    @world_sizes
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        """reduce_dtype is the format; the embedding's 257 rows shard unevenly."""
        flow.check_ranks(
            check, truth, ranks, flow.fully_sharded, world_size, "all_reduce", fmt, fmt.dtype
        )
