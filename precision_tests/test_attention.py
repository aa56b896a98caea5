"""Attention: four linear projections, and softmax(q k^T / sqrt K) v between them.

What goes wrong: partial sums in 16 bit; no scale; a causal mask that is off by one; dropout in
evaluation; another backend; a query that may see nothing yields NaN, or one with a NaN yields 0.

Theorem: a product of K terms errs by gamma_K sum |a b| in any order, u that of the accumulator
(Higham, Accuracy and Stability, (3.5)); softmax multiplies the error of a score by at most the
share, plus the mean over the row; sums of shares times values by gamma_S. All is first order,
element by element, and holds for whole scores as for blocks with a running maximum; derived in
docs/theory/attention.md. A backend that refuses a case leaves it UNVERIFIED.

Truth: projections in exact arithmetic (of multiples of 2^-7) or float64, attention by float64
formulas with the gradients written out (fixtures.numerics.attention_bounds).

Claims of the ledger: 6 (rounding differs between architectures: it does not, the order of sums
does), 7 (fp32 inside SDPA makes the error: it prevents it; bf16 forward 1.4e-3 to 2.0e-3, nearly
all output rounding, gradients by flash 2.3e-3 to 3.5e-3, by math 1.7e-3), 8 (results depend on run
and batch: bitwise equal here).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fixtures import compiling, switches
from fixtures.attending import (
    ATTENTION,
    BACKENDS,
    SHAPES,
    STORED,
    attend,
    backends_of,
    coarse,
    draw_case,
    eager,
    has_case,
    inputs_of,
    magnitudes,
    only,
    project,
    projection_inputs,
    projection_values,
    reordered,
    row_beside,
    takes_mask,
    takes_shape,
)
from fixtures.check import Check
from fixtures.collection import exists
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.examples import examples
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import attention_bounds
from fixtures.numerics.attention_bounds import (
    Attention,
    attention,
    factors_rounded,
    partial_sums_rounded,
    product,
    slices,
)
from fixtures.numerics.bounds import stored_reference
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, TF32, Format
from fixtures.training import flow, philox

formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
backends = pytest.mark.parametrize("implementation", BACKENDS)


# --- golden cases -------------------------------------------------------------------------------


def reference_of(
    inputs: dict[str, Tensor], kind: str, fmt: Format, backend: str = "", device: str = "cpu"
) -> Attention:
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    allowed = inputs.get("allowed")
    if kind == "causal":
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    bias, in_parts = inputs.get("bias"), (backend, device) == ("flash", "cpu")
    return attention(q, k, v, dout, fmt, allowed=allowed, bias=bias, stored_parts=in_parts)


def attention_truth(shape: str) -> Truth:
    inputs = inputs_of(shape)
    values = reference_of(inputs, SHAPES[shape][1], FP64).values
    stored = {name: t.contiguous() for name, t in inputs.items()}
    return Truth(stored, {name: value.float() for name, value in values.items()})


def projection_truth(fine: bool) -> Truth:
    inputs = projection_inputs("golden", 9, 131, 11, fine)
    return Truth(inputs, {name: v.float() for name, v in projection_values(inputs).items()})


GOLDEN = (
    *(
        Golden(
            node="attention",
            name=f"projection-{'fine' if fine else 'coarse'}",
            generate=projection_truth,
            arguments={"fine": fine},
            precision="float64, of coarse numbers exact; rounded once to fp32",
            bound="dot product + rounding",
            uses=(coarse, projection_inputs, projection_values, philox),
            last_bit=fine,
        )
        for fine in (False, True)
    ),
    *(
        Golden(
            node="attention",
            name=shape,
            generate=attention_truth,
            arguments={"shape": shape},
            precision="float64, rounded once to fp32",
            bound="attention + rounding",
            uses=(coarse, inputs_of, reference_of, attention_bounds, philox),
            last_bit=True,
        )
        for shape in STORED
    ),
)


# --- promise: bound -----------------------------------------------------------------------------


@pytest.fixture
def not_refused(device: Device, fmt: Format, implementation: str) -> None:
    """Where this torch refuses a backend as such, its property is UNVERIFIED."""
    attend(inputs_of("causal"), True, fmt, device, implementation)


@formats
class TestBound:
    @pytest.mark.usefixtures("not_refused")
    @backends
    @exists(has_case)
    @examples(12)
    @given(data=st.data())
    def test_attention(
        self, check: Check, device: Device, fmt: Format, implementation: str, data: st.DataObject
    ) -> None:
        """Any sizes and masks that the backend takes, and scores from flat to one-hot."""
        (L, S, K), kind = draw_case(data.draw, backends_of(device)[implementation], fmt)
        factor = data.draw(st.sampled_from([0.125, 1.0, 8.0]))
        stream = f"bound/{data.draw(st.integers(0, 2**20))}"
        shapes = {"q": (L, K), "k": (S, K), "v": (S, K), "dout": (L, K)}
        inputs = {
            n: coarse(f"{stream}/{n}", 1, 2, *size, factor=factor if n == "q" else 1.0)
            for n, size in shapes.items()
        }
        found = reference_of(inputs, kind, fmt, implementation, device.type)
        got = attend(inputs, kind == "causal", fmt, device, implementation)
        for name in ATTENTION:
            where = row_beside(name, inputs)
            check.within(got[name], found.values[name], found.bounds[name], name=name, where=where)

    @examples(20)
    @given(seed=st.integers(0, 2**20), sizes=st.tuples(*map(st.integers, [1] * 3, [40, 300, 40])))
    def test_projection(
        self, check: Check, device: Device, fmt: Format, seed: int, sizes: tuple[int, int, int]
    ) -> None:
        inputs = projection_inputs(f"bound/{seed}", *sizes, fmt is FP32)
        want, (size, terms) = projection_values(inputs)["out"], magnitudes(inputs)["out"]
        x, w, b = (inputs[n].to(device.torch, fmt.dtype) for n in ("x", "w", "b"))
        check.within(F.linear(x, w, b).cpu(), want, product(want, size, terms, fmt))


# --- promise: op --------------------------------------------------------------------------------


class TestOp:
    @pytest.mark.sentinel
    @formats
    @pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
    def test_projection(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format, layout: str
    ) -> None:
        """Forward and three gradients, 131 features; every operand dense, transposed, strided."""
        case = truth(f"projection-{'fine' if fmt is FP32 else 'coarse'}")
        got = project(case.inputs, fmt, device, layout)
        for name, (size, terms) in magnitudes(case.inputs).items():
            want = case.values[name]
            bound = product(want.double(), size, terms, fmt) + stored_reference(want)
            check.within(got[name], want, bound, name=name, inputs=case.digest)

    @pytest.mark.parametrize("switch", ["highest", "high", "medium"])
    def test_float32_matmul_precision(
        self, check: Check, truth: LoadTruth, device: Device, switch: str
    ) -> None:
        """At most, "high" rounds factors to TF32 and "medium" to bf16; "highest" is fp32."""
        case = truth("projection-fine")
        with switches.float32_matmul_precision(switch):
            got = project(case.inputs, FP32, device, "contiguous")["out"]
        want, (size, terms) = case.values["out"].double(), magnitudes(case.inputs)["out"]
        bound = product(want, size, terms, FP32)
        if switch != "highest":
            bound += factors_rounded(size, terms, {"high": TF32, "medium": BF16}[switch])
        check.within(got, want, bound + stored_reference(want), inputs=case.digest)

    @exists(lambda switch: hasattr(torch.backends.cuda.matmul, switch))
    @pytest.mark.parametrize("state", [True, False], ids=["on", "off"])
    @pytest.mark.parametrize(
        ("fmt", "switch"),
        [
            (BF16, "allow_bf16_reduced_precision_reduction"),
            (FP16, "allow_fp16_reduced_precision_reduction"),
            (FP16, "allow_fp16_accumulation"),
        ],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_reduction_switch(
        self, check: Check, device: Device, fmt: Format, switch: str, state: bool
    ) -> None:
        """On, a GPU may keep sums in 16 bit: of the slices of a split product, of which 2048 terms
        have several, or all of them; off, none."""
        every_one = switch == "allow_fp16_accumulation"
        inputs = projection_inputs("switch", 9, 256 if every_one else 2048, 11, fine=False)
        with switches.attribute(torch.backends.cuda.matmul, switch, state):
            got = project(inputs, fmt, device, "contiguous")["out"]
        want, (size, terms) = projection_values(inputs)["out"], magnitudes(inputs)["out"]
        bound = product(want, size, terms, fmt)
        if state and device.type == "cuda":
            parts = terms if every_one else slices(terms)
            bound += partial_sums_rounded(size, parts, fmt)
        check.within(got, want, bound)

    @backends
    @formats
    @exists(takes_shape)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_attention(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        shape: str,
        implementation: str,
    ) -> None:
        case = truth(shape) if shape in STORED else attention_truth(shape)
        inputs, kind = dict(case.inputs), SHAPES[shape][1]
        got = attend(inputs, kind == "causal", fmt, device, implementation)
        limits = reference_of(inputs, kind, fmt, implementation, device.type).bounds
        for name in ATTENTION:
            want = case.values[name]
            check.within(
                got[name],
                want,
                limits[name] + stored_reference(want),
                name=name,
                inputs=case.digest,
                not_repeatable=reordered(device, implementation, name, inputs["k"].shape[-2]),
                where=row_beside(name, inputs),
            )

    @backends
    @formats
    @exists(has_case)
    def test_layouts(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format, implementation: str
    ) -> None:
        """Heads cut out of one projection, (B, L, H, K) transposed, and rows with gaps."""
        case = truth("causal-k64")
        found = reference_of(dict(case.inputs), "causal", fmt)
        q, k, v = (case.inputs[n].to(device.torch, fmt.dtype) for n in ("q", "k", "v"))
        arranged = {
            "transposed": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
            "one-projection": list(torch.cat([q, k, v], -1).chunk(3, -1)),
            "gaps": [torch.stack([t, t + 1], -2)[..., 0, :] for t in (q, k, v)],
        }
        for name, operands in arranged.items():
            with only(implementation):
                out = F.scaled_dot_product_attention(*operands, is_causal=True).cpu()
            check.within(out, found.values["out"], found.bounds["out"], name=name)

    @backends
    @formats
    @exists(takes_mask)
    def test_blind_query_yields_zero(
        self, check: Check, device: Device, fmt: Format, implementation: str
    ) -> None:
        """A query that may see no key gives 0 and no gradient, by either kind of mask, not NaN;
        cuDNN promises nothing of such a row: it is recorded, and spoils no other."""
        inputs = {n: t for n, t in inputs_of("biased").items() if n != "bias"}
        seen = torch.ones(16, 16, dtype=torch.bool)
        seen[5] = False
        masks = {"allowed": seen, "bias": torch.zeros(16, 16).masked_fill(~seen, -math.inf)}
        for kind, mask in masks.items():
            got = attend({**inputs, kind: mask}, False, fmt, device, implementation)
            if implementation == "cudnn":
                others = got["out"][:, :, seen.any(1)]
                check.exact(bool(others.isfinite().all()), True, name=f"{kind}-others")
                check.observe(str(got["out"][0, 0, 5, 0]), name=f"{kind}-blind")
            for name in () if implementation == "cudnn" else ("out", "dq"):
                row = got[name][:, :, 5]
                check.exact(row.abs(), torch.zeros_like(row), name=f"{kind}-{name}")

    @backends
    @formats
    @exists(has_case)
    @pytest.mark.parametrize("keys", [3, 17, 33], ids=lambda n: f"keys{n}")
    @pytest.mark.parametrize("place", ["q", "k", "v"])
    def test_nan_in_nan_out(
        self, check: Check, device: Device, fmt: Format, place: str, keys: int, implementation: str
    ) -> None:
        """Each query that sees the NaN says so (cuDNN's are recorded); no vector holds 3."""
        inputs = {n: coarse(f"nan/{n}", 2, 2, keys, 16) for n in ("q", "k", "v", "dout")}
        at = keys // 2
        inputs[place][:, :, at] = math.nan
        out = attend(inputs, True, fmt, device, implementation)["out"]
        spoilt = out[:, :, slice(at, at + 1 if place == "q" else None)].isnan().all().item()
        if implementation == "cudnn":
            check.observe(spoilt)
        else:
            check.exact(spoilt, True)

    @formats
    @exists(has_case)
    @pytest.mark.parametrize("implementation", ["math", "flash"])
    def test_grouped_queries(
        self, check: Check, device: Device, fmt: Format, implementation: str
    ) -> None:
        """Four heads of queries on two of keys: each pair of heads shares one."""
        q = coarse("gqa/q", 1, 4, 9, 16)
        k, v = coarse("gqa/k", 1, 2, 9, 16), coarse("gqa/v", 1, 2, 9, 16)
        repeated = {"q": q, "k": k.repeat_interleave(2, 1), "v": v.repeat_interleave(2, 1)}
        whole = reference_of({**repeated, "dout": q}, "none", fmt, implementation, device.type)
        found = attention_bounds.grouped(whole, 2, fmt)
        got = attend({"q": q, "k": k, "v": v, "dout": q}, False, fmt, device, implementation)
        for name in ATTENTION:
            check.within(got[name], found.values[name], found.bounds[name], name=name)

    @pytest.mark.compiled
    @pytest.mark.parametrize("fmt", [BF16, FP32], ids=lambda fmt: fmt.name)
    def test_compiled(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        """The compiler may take another kernel, or write one."""
        case, operation = truth("causal"), compiling.compiled(eager)
        backend = [b for b in BACKENDS if has_case(device, fmt, b)][-1]
        got = attend(case.inputs, True, fmt, device, backend, operation)
        limits = reference_of(dict(case.inputs), "causal", fmt, "flash", device.type).bounds
        for name in ATTENTION:
            bound = limits[name] + stored_reference(case.values[name])
            check.within(got[name], case.values[name], bound, name=name, inputs=case.digest)

    @backends
    @formats
    @exists(takes_mask)
    @exists(lambda device: device.type == "cpu")
    def test_alone_or_in_a_batch(
        self, check: Check, device: Device, fmt: Format, implementation: str
    ) -> None:
        """Bitwise on a CPU; elsewhere another kernel may serve another batch: no promise."""
        whole = inputs_of("padded")
        alone = {n: t[1:].contiguous() for n, t in whole.items()}
        with switches.intra_op_threads(1):  # several split sums by the batch that they share
            single, whole = (attend(x, False, fmt, device, implementation) for x in (alone, whole))
        for name in ATTENTION:
            check.exact(single[name], whole[name][1:], name=name)

    @formats
    def test_nothing_is_drawn_in_evaluation(
        self, check: Check, device: Device, fmt: Format
    ) -> None:
        """Two seeds, one result; and which backend torch chose is recorded."""
        inputs = inputs_of("causal")
        q, k, v = (inputs[n].to(device.torch, fmt.dtype).requires_grad_() for n in ("q", "k", "v"))
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        check.exact(found[1].detach(), found[0].detach())
        check.observe(found[0].grad_fn.name(), name="backend")


# --- promise: flow ------------------------------------------------------------------------------


@formats
class TestFlow:
    """Projections and attention run in torch and in the format; the rest of the step is float64."""

    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        flow.check_one_process(check, truth, "attention", fmt, device.torch)

    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        flow.check_ranks(check, truth, ranks, flow.fully_sharded, world_size, "attention", fmt)
