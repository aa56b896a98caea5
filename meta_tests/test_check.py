"""Checks: the text of a failure, literally; what is kept, what is refused, what does not fail."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fixtures import check as check_module
from fixtures import known_faults
from fixtures.check import BoundExceededError, Check, NoLimitError
from fixtures.known_fault import KnownFault
from fixtures.numerics import bounds
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import FP32
from fixtures.record import Case

TEST = "precision_tests/test_gelu.py::TestOp::test_forward[cpu-erf-bf16-eager]"
ENVIRONMENT = {"torch": "2.13.0+cpu", "isa": "avx2", "threads": 1}
FOOTER = f"""\
  environment: torch 2.13.0+cpu, isa avx2, threads 1, id c0253b0f4728
  rerun: pytest "{TEST}\""""
HALF = Bound(0.5, "a theorem", "a source")


def new_check(explored: bool = False) -> Check:
    template = Case("gelu", "op", "forward-erf", "cpu", "bf16", "eager", TEST, inputs="0a1b")
    return Check(template, ENVIRONMENT, explored)


@pytest.fixture
def checking() -> Check:
    return new_check()


def text_of(raised: pytest.ExceptionInfo[BoundExceededError]) -> str:
    return str(raised.value)


class TestFailureText:
    def test_outside_a_bound(self, checking: Check) -> None:
        want = torch.tensor([[1.0, 2.0], [-4.0, 0.0]])
        got = torch.tensor([[1.0, 2.015625], [-4.0, 0.0]], dtype=torch.bfloat16)
        with pytest.raises(BoundExceededError) as raised:
            checking.within(got, want, bounds.rounding(want, FP32) + bounds.stored_reference(want))
        assert text_of(raised) == (
            "gelu op forward-erf [cpu, bf16, eager]: outside its bound by a factor of 6.554e+04\n"
            "  worst at index (0, 1): got 2.015625 (0x1.0200000000000p+1, bits 0x4001), "
            "wanted 2 (0x1.0000000000000p+1, bits 0x40000000)\n"
            "  error: 0.015625 = 1 ulp of bf16; bias +0.25 ulp; normwise 0.00341\n"
            "  bound: 2.38419e-07, one rounding to fp32 + truth stored in fp32 "
            "[ASM, Theorem 2.2]\n" + FOOTER
        )

    def test_outside_a_bound_in_another_format_at_a_named_place(self, checking: Check) -> None:
        want = torch.tensor(1.0, dtype=torch.float64)
        got = torch.tensor(1.75)
        with pytest.raises(BoundExceededError) as raised:
            checking.within(got, want, HALF, name="norm", fmt=FP32, where=lambda at: f"weight{at}")
        assert text_of(raised) == (
            "gelu op forward-erf-norm [cpu, bf16, eager]: outside its bound by a factor of 1.5\n"
            "  worst at index (), weight(): got 1.75 (0x1.c000000000000p+0, bits 0x3fe00000), "
            "wanted 1 (0x1.0000000000000p+0, bits 0x3ff0000000000000)\n"
            "  error: 0.75 = 6.29146e+06 ulp of fp32; bias +6.29e+06 ulp; normwise 0.75\n"
            "  bound: 0.5, a theorem [a source]\n" + FOOTER
        )

    def test_not_finite_where_the_truth_is(self, checking: Check) -> None:
        want = torch.tensor([1.0, 2.0, math.inf, math.nan])
        got = torch.tensor([1.0, math.nan, -math.inf, math.nan])
        with pytest.raises(BoundExceededError) as raised:
            checking.within(got, want, HALF)
        assert text_of(raised) == (
            "gelu op forward-erf [cpu, bf16, eager]: outside its bound by a factor of inf\n"
            "  worst at index (1,): got nan (nan, bits 0x7fc00000), "
            "wanted 2 (0x1.0000000000000p+1, bits 0x40000000)\n"
            "  error: nan = nan ulp of fp32; bias +0 ulp; normwise 0\n"
            "  bound: 0.5, a theorem [a source]\n"
            "  not finite where the truth is, or the reverse: 2 of 4 elements\n" + FOOTER
        )

    def test_other_bits_where_equal_ones_are_due(self, checking: Check) -> None:
        want = torch.tensor([0.0, 1.0, math.nan], dtype=torch.float16)
        got = torch.tensor([-0.0, 2.0, math.nan], dtype=torch.float16)
        with pytest.raises(BoundExceededError) as raised:
            checking.exact(got, want)
        assert text_of(raised) == (
            "gelu op forward-erf [cpu, bf16, eager]: breaks an exact invariant\n"
            "  2 of 3 elements differ, first at index (0,): got -0 (-0x0.0p+0, bits 0x8000), "
            "wanted 0 (0x0.0p+0, bits 0x0000)\n"
            "  bound: exact invariant, equal bits\n" + FOOTER
        )

    def test_another_integer(self, checking: Check) -> None:
        with pytest.raises(BoundExceededError) as raised:
            checking.exact(torch.tensor([[7, 8]]), torch.tensor([[7, -8]]))
        assert "\n  1 of 2 elements differ, first at index (0, 1): got 8, wanted -8\n" in text_of(
            raised
        )

    def test_another_plain_value(self, checking: Check) -> None:
        with pytest.raises(BoundExceededError) as raised:
            checking.exact({"scale": 32768.0}, {"scale": 65536.0}, name="state")
        assert text_of(raised) == (
            "gelu op forward-erf-state [cpu, bf16, eager]: breaks an exact invariant\n"
            "  got {'scale': 32768.0}\n"
            "  wanted {'scale': 65536.0}\n"
            "  bound: exact invariant\n" + FOOTER
        )

    def test_figures_beyond_their_limits(self, checking: Check) -> None:
        errors = {"wte": 0.125, "bias": 3.0, "head": 0.5}
        limits = {"wte": 0.25, "bias": 2.0, "head": 0.125}
        with pytest.raises(BoundExceededError) as raised:
            checking.within_figures(errors, limits, torch.zeros(3), theorem="flow", source="HKZ")
        assert text_of(raised) == (
            "gelu op forward-erf [cpu, bf16, eager]: outside its bound by a factor of 4\n"
            "  worst in head: error 0.5 (normwise)\n"
            "  bound: 0.125, flow [HKZ]\n"
            "  beyond their bound: 2 of 3: head, bias\n" + FOOTER
        )

    def test_figures_that_are_all_zero_verify_nothing(self, checking: Check) -> None:
        zero = {"wte": 0.0, "head": 0.0}
        checking.within_figures(zero, zero, torch.zeros(2), theorem="flow", source="HKZ")
        checking.within_figures(
            zero, zero | {"head": 0.5}, torch.zeros(2), theorem="flow", source="HKZ", name="other"
        )
        checking.within_figures(zero, zero, torch.ones(2), theorem="", source="", name="equal")
        first, other, equal = checking.cases.values()
        assert (first.outcome, other.outcome, equal.outcome) == ("unverified", "inside", "inside")
        assert "what was compared is 0 and verifies nothing" in first.reason

    def test_a_hint_is_asked_for_after_a_failure_only(self, checking: Check) -> None:
        def hold(error: float, name: str) -> None:
            checking.within_figures(
                {"a": error},
                {"a": 1.0},
                torch.zeros(1),
                theorem="",
                source="",
                name=name,
                hint=lambda: asked.append(name) or "gelu",  # type: ignore[func-returns-value]
            )

        asked: list[str] = []
        hold(0.5, "inside")
        with pytest.raises(BoundExceededError, match=r"\n  gelu\n"):
            hold(2.0, "outside")
        assert asked == ["outside"]

    def test_a_refusal_that_did_not_come(self, checking: Check) -> None:
        with pytest.raises(BoundExceededError, match=r"got 'no error'\n  wanted 'ValueError'"):
            checking.raises(ValueError, lambda: None)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("want", [math.nan, math.inf, 1.0])
    def test_can_be_made_of_any_dtype_and_non_finite_value(
        self, checking: Check, dtype: torch.dtype, want: float
    ) -> None:
        got = torch.tensor([[0.0]], dtype=dtype, requires_grad=True)
        with pytest.raises(BoundExceededError, match="by a factor of"):
            checking.within(got, torch.tensor([[want]], dtype=torch.float64), HALF)


class TestWhatHolds:
    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_is_kept_with_its_margin_and_bits(
        self, checking: Check, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        got = torch.full(shape, 1.25, dtype=dtype)
        figures = checking.within(got, torch.full(shape, 1.0), HALF, inputs="f00d")
        (case,) = checking.cases.values()
        assert case.margin == figures.margin == (0.5 if got.numel() else 0.0)
        assert (case.outcome, case.bound, case.inputs) == ("inside", "a theorem", "0a1b-f00d")
        assert case.observed["value"].shape == shape
        assert not case.exact

    @pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
    def test_exactly_is_exact(
        self, checking: Check, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        checking.exact(torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype))
        (case,) = checking.cases.values()
        assert (case.exact, case.margin, case.outcome) == (True, 0.0, "inside")

    def test_non_finite_values_match_their_like(self, checking: Check) -> None:
        special = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
        checking.within(special, special.double(), HALF)
        checking.exact(special, special.clone(), name="exact")

    def test_nan_equals_nan_of_another_payload(self, checking: Check) -> None:
        patterns = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
        checking.exact(patterns.view(torch.float32)[:1], patterns.view(torch.float32)[1:])

    def test_the_limit_itself_is_inside(self, checking: Check) -> None:
        assert checking.within(torch.tensor([1.5]), torch.tensor([1.0]), HALF).margin == 1.0

    def test_a_refusal_that_came(self, checking: Check) -> None:
        checking.raises(ZeroDivisionError, lambda: 1 / 0)
        assert [case.margin for case in checking.cases.values()] == [0.0]

    def test_an_observation_is_not_judged(self, checking: Check) -> None:
        checking.observe({"01": "2", "02": math.nan}, name="order")
        (case,) = checking.cases.values()
        assert (case.name, case.outcome) == ("forward-erf-order", "inside")
        assert case.bound == "none: recorded"
        assert case.observed["value"].bits.tobytes() == b'{"01": "2", "02": NaN}'

    def test_a_report_is_compared_with_no_baseline(self, checking: Check) -> None:
        checking.report("not synchronised", name="here")
        (case,) = checking.cases.values()
        assert (case.outcome, case.compared, case.observed) == ("inside", False, {})
        assert case.figures == {"report": "not synchronised"}


class TestFigures:
    @pytest.mark.parametrize(
        ("error", "limit", "margin"),
        [
            (0.0, 0.0, 0.0),
            (1.0, 2.0, 0.5),
            (1.0, 0.0, math.inf),
            (math.nan, 1.0, math.inf),
        ],
    )
    def test_margin(self, error: float, limit: float, margin: float) -> None:
        checking = new_check(explored=False)
        try:
            checking.within_figures(
                {"a": 0.0, "b": error},
                {"a": 1.0, "b": limit},
                torch.zeros(1),
                theorem="",
                source="",
            )
        except BoundExceededError:
            assert margin > 1
        (case,) = checking.cases.values()
        assert case.margin == margin

    def test_without_a_limit_each_are_refused(self, checking: Check) -> None:
        with pytest.raises(ValueError, match="do not have the same names; differing: a, c"):
            checking.within_figures(
                {"a": 1.0, "b": 1.0}, {"b": 1.0, "c": 1.0}, torch.zeros(1), theorem="", source=""
            )


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        (torch.zeros(2), torch.zeros(3), r"got 'torch.float32 \(2,\)'\n  wanted .*32 \(3,\)'"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), r"wanted 'torch.float64 \(2,\)'"),
        (torch.tensor(0), torch.tensor(0.0), r"got 'torch.int64 \(\)'"),
    ],
)
def test_another_dtype_or_shape_breaks_an_exact_invariant(
    checking: Check, got: torch.Tensor, want: torch.Tensor, text: str
) -> None:
    with pytest.raises(BoundExceededError, match=text):
        checking.exact(got, want)


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (torch.ones(3), r"got 'floating \(3,\)'\n  wanted 'floating \(2,\)'"),
        (torch.ones(()), r"got 'floating \(\)'"),
        (torch.ones(2, dtype=torch.int64), r"got 'torch.int64 \(2,\)'"),
        (torch.ones(2, dtype=torch.complex64), r"got 'torch.complex64 \(2,\)'"),
    ],
)
def test_a_result_of_another_shape_or_kind_is_outside_every_bound(
    checking: Check, monkeypatch: pytest.MonkeyPatch, got: torch.Tensor, text: str
) -> None:
    with pytest.raises(BoundExceededError, match=text):
        checking.within(got, torch.ones(2), HALF)
    assert [case.outcome for case in checking.cases.values()] == ["outside"]
    known = KnownFault((), "", "issue 1", "it is wrong")
    monkeypatch.setattr(check_module, "known_fault", lambda *case: known)
    with pytest.raises(BoundExceededError, match="which no known fault can excuse"):
        checking.within(got, torch.ones(2), HALF, name="known")


class TestWhatIsKept:
    def test_a_failure_is_a_case_with_the_whole_text(self, checking: Check) -> None:
        with pytest.raises(BoundExceededError) as raised:
            checking.exact(1, 2)
        (case,) = checking.cases.values()
        assert (case.outcome, case.margin, case.reason) == ("outside", math.inf, text_of(raised))

    def test_measuring_a_case_twice_is_refused(self, checking: Check) -> None:
        checking.exact(1, 1)
        checking.exact(1, 1, name="again")
        with pytest.raises(ValueError, match=r"gelu/op/forward-erf/cpu/bf16/eager is measured twi"):
            checking.exact(1, 1)

    def test_of_explored_inputs_it_is_the_worst_and_no_values(self) -> None:
        checking = new_check(explored=True)
        for error in (0.125, 0.375, 0.25):
            checking.within(torch.tensor([1.0 + error]), torch.tensor([1.0]), HALF)
            checking.exact(torch.ones(1), torch.ones(1), name="exact")
            checking.exact(1, 1, name="plain")
        assert [(c.margin, c.compared, c.observed) for c in checking.cases.values()] == [
            (0.75, False, {}),
            (0.0, False, {}),
            (0.0, False, {}),
        ]

    def test_explored_inputs_still_fail(self) -> None:
        checking = new_check(explored=True)
        with pytest.raises(BoundExceededError):
            checking.within(torch.tensor([9.0]), torch.tensor([1.0]), HALF)
        checking.within(torch.tensor([1.0]), torch.tensor([1.0]), HALF)
        assert [case.margin for case in checking.cases.values()] == [16.0]

    @pytest.mark.parametrize("got", [1, 2])
    def test_a_known_fault_is_recorded_and_does_not_raise(
        self, checking: Check, monkeypatch: pytest.MonkeyPatch, got: Any
    ) -> None:
        row = KnownFault((), "", "issue 1", "it is wrong")
        asked = []
        monkeypatch.setattr(check_module, "known_fault", lambda *case: asked.append(case) or row)
        checking.exact(got, 1)
        (case,) = checking.cases.values()
        assert case.known == "it is wrong [issue 1]"
        assert case.outcome == ("inside" if got == 1 else "outside")
        wrong = () if got == 1 else ["2"]
        assert asked == [("gelu/op/forward-erf/cpu/bf16/eager", ENVIRONMENT, wrong)]

    @pytest.mark.parametrize(
        ("got", "excused"),
        [([math.inf, 1.0], True), ([math.inf, 1.75], False), ([math.inf, math.nan], False)],
    )
    def test_a_known_fault_excuses_no_other_wrong_value_beside_its_own(
        self, checking: Check, monkeypatch: pytest.MonkeyPatch, got: list[float], excused: bool
    ) -> None:
        row = KnownFault(("gelu/*",), ">=2.13,<=2.13", "issue 1", "it is wrong", got=("inf",))
        monkeypatch.setattr(known_faults, "KNOWN_FAULTS", (row,))
        with nullcontext() if excused else pytest.raises(BoundExceededError):
            checking.within(torch.tensor(got), torch.ones(2), HALF)

    @pytest.mark.parametrize(("error", "excused"), [(2.0, True), (math.nan, False)])
    def test_a_figure_that_is_no_number_is_no_known_fault_unless_its_row_says_so(
        self, checking: Check, monkeypatch: pytest.MonkeyPatch, error: float, excused: bool
    ) -> None:
        row = KnownFault(("gelu/*",), ">=2.13,<=2.13", "issue 1", "it is wrong")
        monkeypatch.setattr(known_faults, "KNOWN_FAULTS", (row,))
        with nullcontext() if excused else pytest.raises(BoundExceededError):
            checking.within_figures(
                {"weight": error}, {"weight": 1.0}, torch.ones(1), theorem="t", source="s"
            )


class TestABoundThatIsNoNumber:
    """It is the suite's own error: nothing was measured, neither inside nor outside."""

    def test_nan_anywhere_in_a_limit(self, checking: Check) -> None:
        limit = torch.tensor([1.0, math.nan], dtype=torch.float64)
        with pytest.raises(NoLimitError, match="a theorem gives no limit, but NaN"):
            checking.within(torch.zeros(2), torch.zeros(2), Bound(limit, "a theorem", "a source"))
        assert checking.cases == {}

    @pytest.mark.parametrize("limit", [math.nan, math.inf])
    def test_a_figure_without_a_limit(self, checking: Check, limit: float) -> None:
        with pytest.raises(NoLimitError, match=f"gives no limit for weight, but {limit}"):
            checking.within_figures(
                {"weight": 0.0}, {"weight": limit}, torch.zeros(1), theorem="t", source="s"
            )
        assert checking.cases == {}
