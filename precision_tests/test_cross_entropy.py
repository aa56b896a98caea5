"""Cross entropy: -log softmax(logits) of the target, its mean over the valid targets, its gradient.

What goes wrong: exp overflows where the maximum is not subtracted; the loss or its sum over rows is
kept in 16 bit, where it overflows or loses its digits; the mean counts targets that are ignored; a
batch or a vocabulary that is spread over ranks is averaged or differentiated wrongly.

Theorem: the error of log-sum-exp with the maximum subtracted (Blanchard, Higham, Higham 2021) and
one rounding of the result, derived in docs/theory/cross_entropy.md; long sums by Higham and Mary.

Truth: 50 digits of mpmath, rounded once to fp32. Logits exact in bf16 and fp16 serve every format.

Claims of the ledger: 40 (computed in fp16 by default: under autocast in fp32, called on 16-bit
logits it returns 16 bit), 41 (an fp16 loss is 0.0023 too high when the largest logit exceeds 12:
half an ulp of the loss, either sign, at any logit), 42 (the error grows exponentially with the
range: linearly), 43 (exp overflows: log_softmax subtracts the maximum), 44 (the fp16 mean is inf
once the sum passes 65504), 45 (log_softmax + nll_loss in bf16 is more stable: equal bits), 46 (a
decorator that checks the loss's dtype: it cannot be called as shown).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fixtures import compiling
from fixtures.check import Check, inputs_at
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.distributed.sharded_loss import parallel_log_softmax, sharded_mean
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import bounds, cross_entropy_bounds, references
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format, round_to
from fixtures.training import flow, philox
from fixtures.training.framework import isolate
from fixtures.training.step import IGNORE, MicroBatch, Training, build
from fixtures.training.truth import CONFIG, StepTruth

ROWS = 9
VOCABULARIES = (2, 7, 16, 33, 257)
RANGES = (4, 40, 1000, 30000)  # losses up to twice that: the end of fp16

# --- golden cases -------------------------------------------------------------------------------


def logits_of(vocabulary: int, size: float, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Logits (rows, vocabulary) in (-size, size), exact in bf16 and fp16; targets (rows,)."""
    stream = f"{vocabulary}/{size}"
    draw = torch.from_numpy(philox.uniform(7, stream, (rows, vocabulary)))
    place = torch.from_numpy(philox.uniform(8, stream, (rows,)))
    targets = ((place + 1.0) * 0.5 * vocabulary).long()
    return round_to(round_to(draw * size, FP16), BF16), targets


def cross_entropy_truth(size: float) -> Truth:
    """By vocabulary: ``loss`` of each row and its ``gradient``."""
    inputs, values = {}, {}
    for vocabulary in VOCABULARIES:
        logits, targets = logits_of(vocabulary, size)
        loss, gradient = cross_entropy_bounds.exact(logits, targets)
        inputs |= {f"logits/{vocabulary}": logits.bfloat16(), f"targets/{vocabulary}": targets}
        values |= {f"loss/{vocabulary}": loss, f"gradient/{vocabulary}": gradient}
    return Truth(inputs, values)


GOLDEN = tuple(
    Golden(
        node="cross_entropy",
        name=f"range-{size}",
        generate=cross_entropy_truth,
        arguments={"size": size},
        precision="mpmath, 50 digits, rounded once to fp32",
        bound="log-sum-exp + rounding",
        uses=(logits_of, cross_entropy_bounds, philox, references),
    )
    for size in RANGES
)

# --- the operation and its bound ----------------------------------------------------------------

Operation = Callable[..., Tensor]


def eager(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits, targets, **options)


def two_steps(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, 1), targets, **options)


def classes_first(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The class dimension is not the last one, as for images: (1, V, N)."""
    return F.cross_entropy(logits.T[None], targets[None], **options).flatten()


def compiled(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return compiling.compiled(eager)(logits, targets, **options)


IMPLEMENTATIONS = {
    "eager": eager,
    "two-steps": two_steps,
    "classes-first": classes_first,
    "compiled": compiled,
}
# Each compiled graph costs seconds: the ends of the ranges.
WAYS = [
    pytest.param(
        size, operation, id=f"{size}-{name}", marks=[pytest.mark.compiled] * (name == "compiled")
    )
    for size in RANGES
    for name, operation in IMPLEMENTATIONS.items()
    if name != "compiled" or size in (RANGES[0], RANGES[-1])
]


def kept_in(fmt: Format, device: Device, operation: Operation = eager) -> Format | None:
    """The CPU's kernel for rows keeps sums of exponentials and their logarithms in 16 bit."""
    return fmt if device.type == "cpu" and operation in (eager, two_steps) else None


def run(
    operation: Operation, logits: Tensor, targets: Tensor, fmt: Format, device: Device
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its gradient."""
    leaf = logits.to(device.torch, fmt.dtype).requires_grad_()
    loss = operation(leaf, targets.to(device.torch), reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


all_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
flow_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
half_formats = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
only_fp32 = pytest.mark.parametrize("fmt", [FP32], ids=lambda fmt: fmt.name)

# --- promise: bound -----------------------------------------------------------------------------

logit = st.floats(-60000, 60000, width=32) | st.floats(-8, 8, width=32)


class TestBound:
    """Holds for whatever logits can be found; in fp32, where no final rounding masks it."""

    @example(row=[0.0, 0.0], target=0)
    @example(row=[1000.0, 999.9999], target=1)
    @example(row=[11.09, -11.09, 12.5], target=2)
    @given(row=st.lists(logit, min_size=2, max_size=40), target=st.integers(0, 39))
    @only_fp32
    def test_any_row(
        self, check: Check, device: Device, fmt: Format, row: list[float], target: int
    ) -> None:
        logits = torch.tensor([row], dtype=torch.float32).double()
        targets = torch.tensor([target % len(row)])
        loss, gradient = run(eager, logits, targets, fmt, device)
        want = cross_entropy_bounds.loss_of(logits, targets)
        here = inputs_at(depth=1, logits=logits, target=targets)
        limit = cross_entropy_bounds.loss_bound(logits, targets, fmt)
        check.within(loss, want, limit, name="loss", where=here)
        limit = cross_entropy_bounds.gradient_bound(logits, targets, torch.ones(1), fmt)
        want = cross_entropy_bounds.gradient_of(logits, targets)
        check.within(gradient, want, limit, name="gradient", where=here)

    @pytest.mark.parametrize("size", RANGES)
    @all_formats
    def test_gradient_of_a_row_sums_to_zero(
        self, check: Check, device: Device, fmt: Format, size: int
    ) -> None:
        logits, targets = logits_of(257, size)
        _, gradient = run(eager, logits, targets, fmt, device)
        each = cross_entropy_bounds.gradient_bound(
            logits, targets, torch.ones(ROWS), fmt, kept_in(fmt, device)
        )
        limit = Bound(torch.as_tensor(each.limit).sum(-1), each.theorem, each.source)
        got = gradient.double().sum(-1)
        check.within(got, torch.zeros_like(got).cpu(), limit, fmt=fmt)


# --- promise: op --------------------------------------------------------------------------------


class TestOp:
    @pytest.mark.sentinel
    @pytest.mark.parametrize(("size", "implementation"), WAYS)
    @all_formats
    def test_golden(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        size: int,
        implementation: Operation,
    ) -> None:
        """Loss of each row and its gradient, for logits up to the end of fp16's range."""
        case = truth(f"range-{size}")
        vocabularies = (257,) if implementation is compiled else VOCABULARIES
        for vocabulary in vocabularies:
            logits = case.inputs[f"logits/{vocabulary}"].double()
            targets = case.inputs[f"targets/{vocabulary}"]
            loss, gradient = run(implementation, logits, targets, fmt, device)
            want = case.values[f"loss/{vocabulary}"]
            kept = kept_in(fmt, device, implementation)
            limit = cross_entropy_bounds.loss_bound(logits, targets, fmt, kept)
            limit += bounds.stored_reference(want)
            measured = partial(
                check.within,
                inputs=case.digest,
                where=inputs_at(depth=1, logits=logits, target=targets),
            )
            measured(loss, want, limit, name=f"v{vocabulary}-loss")
            want = case.values[f"gradient/{vocabulary}"]
            limit = cross_entropy_bounds.gradient_bound(
                logits, targets, torch.ones(ROWS), fmt, kept
            ) + bounds.stored_reference(want)
            measured(gradient, want, limit, name=f"v{vocabulary}-gradient")

    @pytest.mark.parametrize("vocabulary", [128, 32000, 131072])
    @all_formats
    def test_vocabulary(self, check: Check, device: Device, fmt: Format, vocabulary: int) -> None:
        logits, targets = logits_of(vocabulary, 12, rows=4)
        loss, gradient = run(eager, logits, targets, fmt, device)
        kept = kept_in(fmt, device)
        limit = cross_entropy_bounds.loss_bound(logits, targets, fmt, kept)
        check.within(loss, cross_entropy_bounds.loss_of(logits, targets), limit, name="loss")
        limit = cross_entropy_bounds.gradient_bound(logits, targets, torch.ones(4), fmt, kept)
        want = cross_entropy_bounds.gradient_of(logits, targets)
        check.within(gradient, want, limit, name="gradient")

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
    @all_formats
    def test_reduction_with_ignored_targets(
        self, check: Check, device: Device, fmt: Format, weighted: bool, reduction: str
    ) -> None:
        """Mean over the valid targets, by their weights; an ignored row has no gradient."""
        logits, targets = logits_of(33, 12, rows=32)
        weight = round_to(torch.linspace(0.25, 2.0, 33, dtype=torch.float64), BF16)
        ignored = torch.arange(32) % 4 == 1
        shares = (weight[targets] if weighted else torch.ones(32)).masked_fill(ignored, 0).double()
        shares /= shares.sum() if reduction == "mean" else 1.0
        leaf = logits.to(device.torch, fmt.dtype).requires_grad_()
        loss = eager(
            leaf,
            targets.masked_fill(ignored, IGNORE).to(device.torch),
            weight=weight.to(device.torch, fmt.dtype) if weighted else None,
            reduction=reduction,
        )
        loss.backward()
        losses, kept = cross_entropy_bounds.loss_of(logits, targets), kept_in(fmt, device)
        rows = cross_entropy_bounds.loss_bound(logits, targets, fmt, kept)
        limit = cross_entropy_bounds.reduced(rows, losses, shares, fmt)
        check.within(loss.detach(), (shares * losses).sum(), limit, name="loss")
        want = cross_entropy_bounds.gradient_of(logits, targets) * shares[:, None]
        # 1/N or weight/sum, in the format: the sum of weights, the quotient, the product.
        limit = cross_entropy_bounds.gradient_bound(
            logits, targets, shares, fmt, kept, upstream_roundings=8
        )
        assert leaf.grad is not None
        check.within(leaf.grad, want, limit, name="gradient")

    @pytest.mark.parametrize("smoothing", [0.1, 1.0])
    @all_formats
    def test_label_smoothing(
        self, check: Check, device: Device, fmt: Format, smoothing: float
    ) -> None:
        (logits, targets), kept = logits_of(257, 12), kept_in(fmt, device)
        operation = partial(eager, label_smoothing=smoothing)
        loss, gradient = run(operation, logits, targets, fmt, device)
        own = cross_entropy_bounds.loss_of(logits, targets) * (1.0 - smoothing)
        want = own - cross_entropy_bounds.log_p_of(logits).mean(-1) * smoothing
        limit = cross_entropy_bounds.smoothed_bound(logits, targets, smoothing, fmt, kept)
        check.within(loss, want, limit, name="loss")
        want, limit = cross_entropy_bounds.smoothed_gradient_bound(
            logits, targets, smoothing, fmt, kept
        )
        check.within(gradient, want, limit, name="gradient")

    @all_formats
    def test_mean_of_many_rows(self, check: Check, device: Device, fmt: Format) -> None:
        """20,000 losses of 7.5: their sum is beyond fp16, their mean is not."""
        logits = torch.zeros(20000, 2, dtype=torch.float64)
        logits[:, 1] = 7.5
        targets = torch.zeros(20000, dtype=torch.long)
        got = eager(logits.to(device.torch, fmt.dtype), targets.to(device.torch))
        losses = cross_entropy_bounds.loss_of(logits, targets)
        rows = cross_entropy_bounds.loss_bound(logits, targets, fmt, kept_in(fmt, device))
        shares = torch.full_like(losses, 1.0 / len(losses))
        limit = cross_entropy_bounds.reduced(rows, losses, shares, fmt)
        check.within(got, losses.mean(), limit)

    @half_formats
    def test_autocast_computes_in_fp32(self, check: Check, device: Device, fmt: Format) -> None:
        """On CUDA only the loss of the rows: log_softmax, for which torch names the format of the
        logits, rounds to it (CUDA's list lacks cross_entropy_loss; the CPU's has it)."""
        logits, targets = (t.to(device.torch) for t in logits_of(257, 12))
        narrow = logits.to(fmt.dtype)
        with torch.autocast(device.torch.type, fmt.dtype):
            got = eager(narrow, targets)
        on_gpu = F.nll_loss(F.log_softmax(narrow, 1).float(), targets)
        check.exact(got, eager(narrow.float(), targets) if device.type == "cpu" else on_gpu)

    @half_formats
    def test_two_steps_give_the_same_bits(self, check: Check, device: Device, fmt: Format) -> None:
        logits, targets = logits_of(257, 12)
        one, two = (run(way, logits, targets, fmt, device) for way in (eager, two_steps))
        if "cross_entropy" in check.own_kernels():
            pytest.skip("two steps are torch's: your kernel need not round where they do")
        check.exact(two[0], one[0], name="loss")
        check.exact(two[1], one[1], name="gradient")

    @all_formats
    def test_no_valid_target(self, check: Check, device: Device, fmt: Format) -> None:
        """0/0 is NaN for a mean, by definition; a sum is 0."""
        logits = torch.ones(3, 5, dtype=fmt.dtype, device=device.torch)
        targets = torch.full((3,), IGNORE, device=device.torch)
        check.exact(math.isnan(eager(logits, targets).item()), True, name="mean")
        check.exact(eager(logits, targets, reduction="sum").item(), 0.0, name="sum")

    @pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
    @all_formats
    def test_nonfinite_logit_spoils_its_row_only(
        self, check: Check, device: Device, fmt: Format, value: float
    ) -> None:
        logits = torch.ones(3, 33, dtype=fmt.dtype, device=device.torch)
        logits[1, 20] = value
        targets = torch.tensor([0, 1, 2], device=device.torch)
        got = eager(logits, targets, reduction="none").isfinite().tolist()
        check.exact(got, [True, False, True])


# --- promise: flow ------------------------------------------------------------------------------


class TestFlow:
    """Only cross entropy runs torch's operation in the format; all the rest is float64."""

    @flow_formats
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        flow.check_one_process(check, truth, "cross_entropy", fmt, device.torch)

    @flow_formats
    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        flow.check_ranks(check, truth, ranks, flow.fully_sharded, world_size, "cross_entropy", fmt)

    @only_fp32
    def test_micro_batch_without_valid_targets_changes_nothing(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format
    ) -> None:
        step, found = StepTruth.load(truth), []
        first = step.micro_batches[0]
        empty = MicroBatch(first.tokens, torch.full_like(first.targets, IGNORE), first.keep)
        for batches in ([first], [first, empty]):
            ops = isolate("cross_entropy", fmt.dtype)
            model = build(CONFIG, ops, device.torch, parameters=step.parameters)
            training = Training(model, ops, CONFIG, device.torch)
            gradients = training.gradients([b.to(device.torch) for b in batches]).gradients
            found.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))
        check.exact(found[1] + 0.0, found[0] + 0.0)

    @pytest.mark.parametrize("shares", ["equal", "weighted", "some-ignored"])
    @only_fp32
    def test_mean_over_a_sharded_batch(
        self, check: Check, ranks: RunRanks, fmt: Format, shares: str
    ) -> None:
        """The ranks' rows weigh differently, so the mean of their means is another number."""
        logits, targets = logits_of(7, 4, rows=8)[0], torch.arange(8) % 7
        weight = torch.arange(1.0, 8.0) if shares == "weighted" else torch.ones(7)
        ignored = targets < (2 if shares == "some-ignored" else 0)
        marked = targets.masked_fill(ignored, IGNORE)
        got = ranks(sharded_mean, 2, logits.float(), marked, weight)
        share = weight[targets].masked_fill(ignored, 0.0).double()
        share /= share.sum()
        losses = cross_entropy_bounds.loss_of(logits, targets)
        rows = cross_entropy_bounds.loss_bound(logits, targets, fmt)
        limit = cross_entropy_bounds.reduced(rows, losses, share, fmt)
        check.within(got[0], (share * losses).sum(), limit)

    @only_fp32
    def test_log_softmax_inside_loss_parallel(
        self, check: Check, ranks: RunRanks, fmt: Format
    ) -> None:
        """Its gradient with e_t upstream is e_t - p."""
        logits, targets = logits_of(8, 4)
        upstream = F.one_hot(targets, 8).float()
        got = ranks(parallel_log_softmax, 2, logits.float(), upstream)
        limit = cross_entropy_bounds.gradient_bound(logits, targets, torch.ones(ROWS), fmt)
        check.within(-got[0], cross_entropy_bounds.gradient_of(logits, targets), limit)
