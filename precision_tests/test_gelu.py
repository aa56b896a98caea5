"""GELU: x Phi(x), with Phi by erf or by the tanh approximation, and its dtype error.

What goes wrong: the tanh form is taken for the erf form (3e-4 apart on average, more than any fp32
error and less than a bf16 one); intermediates are rounded to 16 bit; the gradient belongs to the
other form. There is no relative bound: 1 + erf cancels in the negative tail. The bound is
absolute, |err| <= c u32 |x| with c derived in docs/theory/gelu.md, plus one rounding of the
result; 16-bit inputs are swept exhaustively.

Truth: float64 with a stated error, rounded once to fp32, by 50 digits of mpmath where float64
cannot decide (fixtures.numerics.references). Finite inputs; the limits at infinity are exact cases.

Claims of the ledger: 19 (mean gradient error on [-3, 3] stated 0.012; the bf16 result is correctly
rounded there, at most 3.9e-3), 20 (fp32 stated 1.8e-7; that is nearer the maximum than the mean),
21 (no saturation zone on [-3, 3]), 22 (65,536 inputs are cheaper than 100,000 samples).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from fixtures import compiling
from fixtures.check import Check, inputs_at
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import bounds, gelu_bounds, references
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import BF16, FORMATS, FP16, FP32, FP64, Format, all_values, from_bits
from fixtures.numerics.gelu_bounds import elementary
from fixtures.training import flow

FORMS = ("erf", "tanh")
APPROXIMATE = {"erf": "none", "tanh": "tanh"}

# The tanh form's gradient needs x * x, which overflows fp32 from the first on; x (1 + erf), not yet
# halved, does from the second on. Known faults stand there: the rest is a case of its own.
SQUARE_OVERFLOWS = 2.0**63.5
DOUBLE_OVERFLOWS = 2.0**127


# --- golden cases -------------------------------------------------------------------------------


def inputs_of(fmt: Format) -> torch.Tensor:
    """All finite 16-bit values; of fp32 a dense grid and bit patterns across all exponents."""
    if fmt in (BF16, FP16):
        values = all_values(fmt)
        return values[torch.isfinite(values)]
    dense = torch.arange(-12 * 512, 12 * 512 + 1, dtype=torch.float32) / 512
    patterns = torch.arange(0, 2**32, 2**20 - 3, dtype=torch.int64).to(torch.int32)
    scattered = from_bits(patterns, torch.float32)
    return torch.cat([dense, scattered[torch.isfinite(scattered)]])


def gelu_truth(fmt: str) -> Truth:
    """``erf_forward``, ``erf_gradient``, ``tanh_forward``, ``tanh_gradient``."""
    x = inputs_of(FORMATS[fmt])
    ulps = {"erf": references.GELU_ERF_ULPS, "tanh": references.GELU_TANH_ULPS}
    values = {}
    for form in FORMS:
        for kind, name in (("forward", f"gelu_{form}"), ("gradient", f"gelu_{form}_gradient")):
            reference, exact = getattr(references, name), getattr(references, f"{name}_mp")
            rounded = references.round_once(reference, exact, x.double().numpy(), ulps[form])
            values[f"{form}_{kind}"] = torch.from_numpy(rounded)
    return Truth(inputs={"x": x}, values=values)


GOLDEN = tuple(
    Golden(
        node="gelu",
        name=fmt.name,
        generate=gelu_truth,
        arguments={"fmt": fmt.name},
        precision="float64, rounded once to fp32 (Ziv; mpmath, 50 digits)",
        bound="gelu_erf, gelu_tanh, their gradients + rounding",
        uses=(inputs_of, references),
    )
    for fmt in (BF16, FP16, FP32)
)


# --- the operation and its bound ----------------------------------------------------------------


Operation = Callable[[torch.Tensor, str], torch.Tensor]


def eager(x: torch.Tensor, form: str) -> torch.Tensor:
    return F.gelu(x, approximate=APPROXIMATE[form])


def strided(x: torch.Tensor, form: str) -> torch.Tensor:
    """Every third element of a larger tensor: another inner loop than the contiguous one."""
    spread = x.new_zeros(x.numel(), 3)
    spread[:, 1] = x
    return F.gelu(spread[:, 1], approximate=APPROXIMATE[form])


def compiled(x: torch.Tensor, form: str) -> torch.Tensor:
    return compiling.compiled(eager)(x, form)


IMPLEMENTATIONS = [
    pytest.param(eager, id="eager"),
    pytest.param(strided, id="strided"),
    pytest.param(compiled, id="compiled", marks=pytest.mark.compiled),
]


def bound_of(form: str, x: torch.Tensor, want: torch.Tensor, fmt: Format, device: Device) -> Bound:
    """The forward bound: the fp32 evaluation, then one rounding of what it returns."""
    evaluation = {"erf": gelu_bounds.gelu_erf, "tanh": gelu_bounds.gelu_tanh}[form](
        x, elementary(device.name, device.type)
    )
    return _with_result_rounded(evaluation, want, fmt)


def gradient_bound_of(
    form: str, x: torch.Tensor, dy: float, want: torch.Tensor, fmt: Format, device: Device
) -> Bound:
    functions = {"erf": gelu_bounds.gelu_erf_gradient, "tanh": gelu_bounds.gelu_tanh_gradient}
    evaluation = functions[form](x, dy, elementary(device.name, device.type))
    return _with_result_rounded(evaluation, want, fmt)


def _with_result_rounded(evaluation: Bound, want: torch.Tensor, fmt: Format) -> Bound:
    # fp32 results have had their last rounding inside the evaluation.
    if fmt is FP32:
        return evaluation
    return evaluation + bounds.rounding(want, fmt, evaluation.limit)


def gradient(operation: Operation, x: torch.Tensor, form: str, dy: float) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    upstream = torch.full_like(x, dy)
    return torch.autograd.grad(operation(leaf, form), leaf, upstream)[0]


# --- promise: bound -----------------------------------------------------------------------------

# Inputs whose error came nearest to the bound in 4.5 million (torch 2.13.0, CPU): replayed first.
WORST = {
    "forward-erf": (-2.9851601123809814, -3.9820399284362793, -3.469855785369873),  # 0.63 of it
    "forward-tanh": (0.00012303433322813362, 7.846242624509614e-06, 0.003906321246176958),  # 0.98
    "gradient-erf": (-12.652546882629395, -12.044318199157715, -0.7517916),  # 0.98
    "gradient-tanh": (7.470288920785606e-08, 8.21734033706889e-07, -0.7524614),  # 0.67
}

finite_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
near_zero = st.floats(min_value=-8, max_value=8, width=32)


def replayed(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Puts the worst inputs of both forms in front of what Hypothesis searches."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        for form in FORMS:
            test = example(values=list(WORST[f"{kind}-{form}"]))(test)
        return test

    return decorate


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", [FP32], ids=lambda fmt: fmt.name)
class TestBound:
    """Holds for whatever input can be found; in fp32, where no final rounding masks it."""

    @replayed("forward")
    @given(values=st.lists(finite_fp32 | near_zero, min_size=1, max_size=64))
    def test_forward(
        self, check: Check, device: Device, fmt: Format, form: str, values: list[float]
    ) -> None:
        x = torch.tensor(values, dtype=torch.float32)
        x = x[x.abs() < DOUBLE_OVERFLOWS]  # beyond: TestOp
        want = torch.from_numpy(getattr(references, f"gelu_{form}")(x.double().numpy()))
        got = eager(x.to(device.torch), form)
        check.within(got, want, bound_of(form, x, want, fmt, device), where=inputs_at(x=x))

    @replayed("gradient")
    @given(values=st.lists(finite_fp32 | near_zero, min_size=1, max_size=64))
    def test_gradient(
        self, check: Check, device: Device, fmt: Format, form: str, values: list[float]
    ) -> None:
        x = torch.tensor(values, dtype=torch.float32)
        if form == "tanh":
            x = x[x.abs() < SQUARE_OVERFLOWS]  # beyond: TestOp
        want = torch.from_numpy(getattr(references, f"gelu_{form}_gradient")(x.double().numpy()))
        got = gradient(eager, x.to(device.torch), form, 1.0)
        bound = gradient_bound_of(form, x, 1.0, want, fmt, device)
        check.within(got, want, bound, where=inputs_at(x=x))


# --- promise: op --------------------------------------------------------------------------------


all_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
flow_formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
both_forms = pytest.mark.parametrize("form", FORMS)


class TestOp:
    """All 16-bit inputs, and fp32 ones over all exponents, against golden truth."""

    @pytest.mark.sentinel
    @all_implementations
    @both_forms
    @all_formats
    def test_forward(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        form: str,
        implementation: Operation,
    ) -> None:
        """Within the bound; of the largest numbers it is x or 0, so nothing may overflow."""
        case = truth(fmt.name)
        x, want = case.inputs["x"], case.values[f"{form}_forward"]
        got = implementation(x.to(device.torch), form).cpu()
        huge = x.double().abs() >= DOUBLE_OVERFLOWS
        near, want_near = x[~huge], want[~huge]
        bound = bound_of(form, near, want_near, fmt, device) + bounds.stored_reference(want_near)
        check.within(got[~huge], want_near, bound, inputs=case.digest, where=inputs_at(x=near))
        if huge.any():  # fp16 has no such inputs
            want_huge = want[huge].to(fmt.dtype)
            check.exact(got[huge] + 0.0, want_huge + 0.0, name="huge", inputs=case.digest)

    @all_implementations
    @both_forms
    @all_formats
    def test_gradient(
        self,
        check: Check,
        truth: LoadTruth,
        device: Device,
        fmt: Format,
        form: str,
        implementation: Operation,
    ) -> None:
        """Within the bound; the tanh form's is 1 or 0, not 0 inf, where x * x overflows fp32."""
        case = truth(fmt.name)
        x, want = case.inputs["x"], case.values[f"{form}_gradient"]
        got = gradient(implementation, x.to(device.torch), form, 1.0).cpu()
        huge = x.double().abs() >= (SQUARE_OVERFLOWS if form == "tanh" else float("inf"))
        near, want_near = x[~huge], want[~huge]
        bound = gradient_bound_of(form, near, 1.0, want_near, fmt, device)
        bound += bounds.stored_reference(want_near)
        check.within(got[~huge], want_near, bound, inputs=case.digest, where=inputs_at(x=near))
        if huge.any():
            want_huge = want[huge].to(fmt.dtype)
            check.exact(got[huge] + 0.0, want_huge + 0.0, name="huge", inputs=case.digest)

    @pytest.mark.parametrize("dy", [-0.71875, 96.0], ids=lambda dy: f"dy{dy:g}")
    @both_forms
    @all_formats
    def test_gradient_scales_with_the_upstream_gradient(
        self, check: Check, truth: LoadTruth, device: Device, fmt: Format, form: str, dy: float
    ) -> None:
        """Any upstream gradient; |x| <= 30, where no product leaves the range of fp16."""
        case = truth(fmt.name)
        near = case.inputs["x"].double().abs() <= 30
        x, unscaled = case.inputs["x"][near], case.values[f"{form}_gradient"][near]
        want = unscaled.double() * dy
        got = gradient(eager, x.to(device.torch), form, dy)
        bound = gradient_bound_of(form, x, dy, want, fmt, device)
        bound += bounds.stored_reference(unscaled, scale=dy)
        check.within(got, want, bound, inputs=case.digest, where=inputs_at(x=x))

    @both_forms
    @all_formats
    def test_nan_in_nan_out(self, check: Check, device: Device, fmt: Format, form: str) -> None:
        x = torch.tensor([float("nan"), -2.0, 1.0], dtype=fmt.dtype)
        got = eager(x.to(device.torch), form).isnan().tolist()
        check.exact(got, [True, False, False])

    @both_forms
    @all_formats
    @pytest.mark.parametrize("sign", ["plus", "minus"])
    def test_limit_at_infinity(
        self, check: Check, device: Device, fmt: Format, form: str, sign: str
    ) -> None:
        """inf at inf, 0 at -inf."""
        infinity = float("inf")
        x = torch.tensor([infinity if sign == "plus" else -infinity, 1.0], dtype=fmt.dtype)
        want = infinity if sign == "plus" else 0.0
        check.exact(eager(x.to(device.torch), form)[0].item(), want)


# --- promise: flow ------------------------------------------------------------------------------


class TestFlow:
    """Only GELU runs torch's operation in the format; the whole rest of the step is float64.

    The fp32 flow sees the tanh form in place of the erf form; a 16-bit one sees errors of its own
    size only.
    """

    @flow_formats
    def test_one_process(self, check: Check, truth: LoadTruth, device: Device, fmt: Format) -> None:
        flow.check_one_process(check, truth, "gelu", fmt, device.torch)

    @flow_formats
    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_fully_sharded(
        self, check: Check, truth: LoadTruth, ranks: RunRanks, fmt: Format, world_size: int
    ) -> None:
        flow.check_ranks(check, truth, ranks, flow.fully_sharded, world_size, "gelu", fmt)
