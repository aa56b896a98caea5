"""Gradient accumulation: sums over micro-batches, and the sums inside one backward.

What goes wrong: a mean of means where micro-batches hold unequal numbers of valid targets; a last,
partial window divided by the full count; gradients zeroed in the loop; the flag that holds back
synchronisation flipped; a 16-bit accumulator, which stops growing.

Theorem: with weights n_k / N the weighted sum of means is the mean over all N valid targets, for
any split, so |err| <= gamma_(n + K + 4) sum |terms| in any order, n the largest n_k (Higham,
Accuracy and Stability, (3.5)). That the batch divides by micro-batches and ranks is sufficient, not
necessary. A sum of K terms in one format is within gamma_(K-1) sum |g_k|; one addition is one
rounding, so a 16-bit accumulator is predicted bit for bit, and stands still at 2^p for gradients
of 1.

Truth: sums of products in exact rational arithmetic, rounded once to fp32.

Claims of the ledger: 9 and 12 (not dividing stated to cost 0.0003 %: a mean of means costs 3 to 160
%, a weighted one nothing), 16 (shard_param_on_dim_0 is torch_xla's; FSDP1 splits one flat vector,
fully_shard by rows), 17 (an all-gather in fp32: a copy, exact in each format; what is gathered has
the policy's param_dtype), 18 (offload re-quantises: the fp32 master stays), 101 (never bitwise the
full batch, nor in another order: within gamma), 102 (bf16 accumulator -2.6 % at 1024 micro-batches;
no valid target: the mean is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed import sharding
from fixtures.distributed.ranks import Rank, RunRanks
from fixtures.examples import examples
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import accumulation_bounds, bounds, references
from fixtures.numerics.formats import BF16, FORMATS, FP16, FP32, FP64, Format, round_to
from fixtures.training import flow, framework, philox
from fixtures.training.integers import integer_layers, integer_rows

# Valid targets of each micro-batch, by window; every window is one step.
SPLITS = {
    "equal": ((8, 8, 8, 8),),
    "unequal": ((20, 4, 7, 1),),
    "one-without-targets": ((12, 0, 20),),
    "partial-last-window": ((8, 8, 8), (3,)),
    "many": (tuple(1 + k % 3 for k in range(48)),),
}
WIDTH = 33
REPEATS = {"bias": 1000, "transposed": 1000, "strided": 1000, "embedding": 8, "index": 8}
REPEATS |= {"embedding-frequent": 1000, "index-frequent": 1000, "index-narrow-frequent": 1000}
WARP = 32  # CUDA has another kernel for an index into rows that are no wider

formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)


# --- golden cases -------------------------------------------------------------------------------


def rows_of(split: str, fmt: Format, width: int = WIDTH) -> Tensor:
    """A row per valid target: its input, and its weight in the loss as the last column."""
    count = sum(map(sum, SPLITS[split]))
    drawn = torch.from_numpy(philox.uniform(31, f"rows {split}", (count, width + 1)))
    return round_to(drawn, fmt).to(fmt.dtype)


def mean_truth(split: str) -> Truth:
    """Per window the gradient of the mean over its targets: mean of weight times input, exact."""
    rows = rows_of(split, FP32)
    values, start = {}, 0
    for number, window in enumerate(SPLITS[split]):
        taken = rows[start : start + sum(window)].double().numpy()
        start += sum(window)
        products = taken[:, :-1] * taken[:, -1:]  # of fp32 numbers: exact in float64
        columns = products.T.tolist()
        means = [sum(map(Fraction, column), Fraction()) / len(column) for column in columns]
        rounded = np.array([references.round_fraction(mean) for mean in means])
        values[f"window{number}"] = torch.from_numpy(rounded)
    return Truth({"rows": rows}, values)


def gradient_rows(fmt: Format, count: int) -> Tensor:
    """Upstream gradients, mostly of one sign: (count, WIDTH)."""
    drawn = torch.from_numpy(philox.uniform(37, "upstream", (count, WIDTH))) * 0.625 + 0.375
    return round_to(drawn, fmt).to(fmt.dtype)


def sum_truth(fmt: str) -> Truth:
    """Exact column sums of the first 8 and of all 1000 rows."""
    rows = gradient_rows(FORMATS[fmt], max(REPEATS.values()))
    columns = rows.double().numpy()
    sums = {str(n): references.exact_sum(list(columns[:n])) for n in set(REPEATS.values())}
    return Truth({"rows": rows}, {name: torch.from_numpy(value) for name, value in sums.items()})


GOLDEN = (
    *(
        Golden(
            node="gradient_accumulation",
            name=f"mean-{split}",
            generate=mean_truth,
            arguments={"split": split},
            precision="exact rational arithmetic, rounded once to fp32",
            bound="gamma_(n+K+4)",
            uses=(rows_of, references, philox),
        )
        for split in SPLITS
    ),
    *(
        Golden(
            node="gradient_accumulation",
            name=f"sum-{fmt}",
            generate=sum_truth,
            arguments={"fmt": fmt},
            precision="exact rational arithmetic, rounded once to fp32",
            bound="gamma_n",
            uses=(gradient_rows, references, philox),
        )
        for fmt in ("bf16", "fp16", "fp32")
    ),
)


# --- the operation and its bound ----------------------------------------------------------------


def accumulate(parameter: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The gradient of the mean over all rows of ``parts``, one backward for each part."""

    def losses() -> Iterator[Tensor]:
        for part in parts:
            outputs = part[:, :-1] @ parameter
            # As the step does: a mean over no target is 0 / 0.
            yield (part[:, -1] * outputs).mean() if len(part) else 0.0 * outputs.sum()

    total = sum(map(len, parts))
    weights = [len(part) / total for part in parts]
    framework.FRAMEWORK.gradient_accumulation([parameter], losses(), weights)
    assert parameter.grad is not None
    return parameter.grad


def bound_of(rows: Tensor, sizes: Sequence[int], fmt: Format) -> bounds.Bound:
    magnitudes = (rows[:, :-1].double() * rows[:, -1:].double()).abs().mean(0)
    return accumulation_bounds.weighted_means(magnitudes, max(sizes), len(sizes), fmt)


def parameter_on(device: Device, width: int, fmt: Format) -> Tensor:
    return torch.zeros(width, dtype=fmt.dtype, device=device.torch, requires_grad=True)


# --- promise: bound -----------------------------------------------------------------------------


class TestBound:
    @examples(60)
    @given(
        counts=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
        width=st.integers(1, 40),
        order=st.randoms(use_true_random=False),
    )
    @pytest.mark.parametrize("fmt", [FP32, FP64], ids=lambda fmt: fmt.name)
    def test_any_split_in_any_order(
        self,
        check: Check,
        device: Device,
        fmt: Format,
        counts: list[int],
        width: int,
        order: object,
    ) -> None:
        drawn = philox.uniform(41, "split", (sum(counts), width + 1))
        rows = torch.from_numpy(drawn).float().to(fmt.dtype)
        parts = list(rows.to(device.torch).split(counts))
        getattr(order, "shuffle")(parts)  # noqa: B009
        exact = rows.double()
        want = (exact[:, :-1] * exact[:, -1:]).mean(0)
        got = accumulate(parameter_on(device, width, fmt), parts)
        own = bound_of(rows, counts, FP64)  # the truth's
        check.within(got, want, bound_of(rows, counts, fmt) + own)

    @pytest.mark.parametrize("count", [4, 64, 1024], ids=lambda n: f"k{n}")
    @formats
    def test_accumulator(self, check: Check, device: Device, fmt: Format, count: int) -> None:
        """Gradients of K backward passes: added one by one, each sum rounded once."""
        gradients = gradient_rows(fmt, count)
        parameter = parameter_on(device, WIDTH, fmt)
        for gradient in gradients.to(device.torch):
            (parameter * gradient).sum().backward()
        assert parameter.grad is not None
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for gradient in gradients.double():
            total = round_to(total + gradient, fmt)
        check.exact(parameter.grad.cpu(), total.to(fmt.dtype))
        if count * fmt.unit_roundoff < 1:
            exact = gradients.double()
            bound = accumulation_bounds.accumulator(exact.abs().sum(0), count, fmt)
            check.within(parameter.grad, exact.sum(0), bound, name="gamma")

    @formats
    def test_16_bit_accumulators_stand_still(
        self, check: Check, device: Device, fmt: Format
    ) -> None:
        """Gradients of 1 add up to 2^p and no further."""
        parameter = parameter_on(device, 3, fmt)
        for _ in range(2100):
            parameter.sum().backward()
        assert parameter.grad is not None
        check.exact(parameter.grad.tolist(), [float(min(2100, 2**fmt.precision))] * 3)


# --- promise: op --------------------------------------------------------------------------------


def inside_one_backward(implementation: str, rows: Tensor) -> Tensor:
    """A gradient that sums all rows, (width,), in one backward."""
    (count, width), device = rows.shape, rows.device
    if implementation.startswith(("embedding", "index")):
        table = rows.new_zeros(3, width).requires_grad_()
        places = torch.full((count,), 1, device=device)
        looked_up = F.embedding(places, table) if "embed" in implementation else table[places]
        looked_up.backward(rows)
        assert table.grad is not None
        return table.grad[1]
    bias = rows.new_zeros(width).requires_grad_()
    weight, x = rows.new_zeros(width, 5), rows.new_zeros(count, 5)
    if implementation == "transposed":
        rows = rows.t().contiguous().t()
    if implementation == "strided":
        rows = torch.stack([rows, rows + 1], dim=2)[:, :, 0]
    F.linear(x, weight, bias).backward(rows)
    assert bias.grad is not None
    return bias.grad


def bound_inside(
    implementation: str, rows: Tensor, want: Tensor, device: Device, fmt: Format
) -> bounds.Bound:
    """By where the device's kernel adds: in fp32, or 16 bit too where an index is repeated."""
    (count, width), size = rows.shape, rows.double().abs().sum(0)
    few, on_gpu = count == REPEATS["index"], device.type == "cuda" and fmt is not FP32
    if on_gpu and implementation.startswith("embedding"):  # Embedding.cu, up to 3072 indices
        return accumulation_bounds.in_blocks(size, count, 32, fmt)
    if on_gpu and implementation.startswith("index") and width > WARP and not few:  # Indexing.cu
        return accumulation_bounds.one_by_one(rows, fmt)
    bound = accumulation_bounds.accumulator(size, count, fmt if few else FP32)
    return bound + bounds.rounding(want, fmt, bound.limit)


class TestOp:
    @pytest.mark.sentinel
    @pytest.mark.parametrize("split", SPLITS)
    def test_weighted_by_targets(
        self, check: Check, truth: LoadTruth, device: Device, split: str
    ) -> None:
        """Each window of micro-batches gives the gradient of the mean over its targets."""
        case = truth(f"mean-{split}")
        rows = case.inputs["rows"]
        parameter = parameter_on(device, WIDTH, FP32)
        start = 0
        for number, window in enumerate(SPLITS[split]):
            taken = rows[start : start + sum(window)]
            start += sum(window)
            got = accumulate(parameter, taken.to(device.torch).split(list(window)))
            want = case.values[f"window{number}"]
            bound = bound_of(taken, window, FP32) + bounds.stored_reference(want)
            check.within(got, want, bound, name=f"window{number}", inputs=case.digest)

    @pytest.mark.parametrize("split", ["equal", "unequal", "many"])
    def test_full_batch(self, check: Check, truth: LoadTruth, device: Device, split: str) -> None:
        """One backward over all rows meets the same truth, and no other order leaves the bound."""
        case = truth(f"mean-{split}")
        rows, want = case.inputs["rows"], case.values["window0"]
        parts = list(rows.to(device.torch).split(list(SPLITS[split][0])))
        for name, order in (("whole", [rows.to(device.torch)]), ("reversed", parts[::-1])):
            got = accumulate(parameter_on(device, WIDTH, FP32), order)
            bound = bound_of(rows, list(map(len, order)), FP32) + bounds.stored_reference(want)
            check.within(got, want, bound, name=name, inputs=case.digest)

    def test_mean_over_no_target_is_nan(self, check: Check, device: Device) -> None:
        """By definition 0 / 0; the step leaves such a micro-batch out."""
        loss = parameter_on(device, 3, FP32)[:0].mean()
        check.exact(math.isnan(float(loss.detach())), True)

    @formats
    @pytest.mark.parametrize("implementation", REPEATS)
    def test_sums_inside_one_backward(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format, implementation: str
    ) -> None:
        """Bias gradients over rows of any layout, and repeated indices: summed in fp32, but for
        what a kernel is known to add in 16 bit."""
        case, count = truth(f"sum-{fmt.name}"), REPEATS[implementation]
        width = WARP if "narrow" in implementation else WIDTH
        rows = case.inputs["rows"][:count, :width]
        want = case.values[str(count)][:width]
        got = inside_one_backward(implementation, rows.to(device.torch).contiguous())
        bound = bound_inside(implementation, rows, want, device, fmt)
        check.within(got, want, bound + bounds.stored_reference(want), inputs=case.digest)


# --- promise: flow ------------------------------------------------------------------------------


def hold_back(rank: Rank, wrapper: str) -> dict[str, Tensor]:
    """Gradients of three micro-batches of which only the last one synchronises the ranks."""
    model: nn.Module = integer_layers().to(rank.device)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = sharding.shard(model, blocks=list(model.children()), rank=rank)
    parts = integer_rows(24, 4).to(rank.device)[rank.index :: rank.world_size].chunk(3)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if wrapper == "fully_shard":
            getattr(model, "set_requires_gradient_sync")(last)  # noqa: B009
        quiet = wrapper == "ddp" and not last
        with getattr(model, "no_sync")() if quiet else nullcontext():  # noqa: B009
            model(part).sum().backward()
    found = sharding.full_gradients(model)
    return {name.removeprefix("module."): gradient for name, gradient in found.items()}


flow_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
world_sizes = pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")


class TestFlow:
    """Micro-batch gradients are float64; only their accumulation runs in the format."""

    @flow_formats
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        flow.check_one_process(check, truth, "gradient_accumulation", fmt, device.torch)

    @flow_formats
    @world_sizes
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        job: Callable[..., dict[str, Tensor]] = flow.fully_sharded
        flow.check_ranks(check, truth, ranks, job, world_size, "gradient_accumulation", fmt)

    @world_sizes
    @pytest.mark.parametrize("implementation", ["ddp", "fully_shard"])
    def test_synchronised_once(
        self, check: Check, ranks: RunRanks, world_size: int, implementation: str
    ) -> None:
        """Held back but for the last micro-batch, the ranks have the gradient of all rows."""
        model = integer_layers()
        (model(integer_rows(24, 4)).sum() / world_size).backward()
        want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for rank, got in enumerate(ranks(hold_back, world_size, implementation)):
            for name, gradient in want.items():
                check.exact(got[name], gradient, name=f"rank{rank}-{name.replace('.', '-')}")
