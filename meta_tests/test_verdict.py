"""Verdicts: the table, row by row; the exit code; what the matrix shows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fixtures import verdict
from fixtures.nodes import NODE_IDS
from fixtures.options import place_of
from fixtures.record import Case, Record, observe
from fixtures.verdict import (
    Judgement,
    Verdict,
    areas,
    cell,
    exit_code,
    judge,
    judge_record,
    matrix,
)


def case_of(*bits: int, **changes: object) -> Case:
    """An inside case in fp32, with margin 1/2; ``bits`` are what it observed."""
    observed = {"value": observe(np.array(bits or (1,), np.uint32), "fp32")}
    case = Case("gelu", "op", "forward", "cpu", margin=0.5, bound="gelu_erf", observed=observed)
    return replace(case, **changes)  # type: ignore[arg-type]


OLD, MOVED, AGAIN = case_of(1), case_of(4), case_of(5)
OUTSIDE = {"outcome": "outside", "margin": 7.0, "reason": "beyond"}
ATOMICS = "atomics in the backward"


class TestTable:
    """Inside? same bits? same environment? -> verdict."""

    @pytest.mark.parametrize("changed", [False, True], ids=["same-env", "changed-env"])
    @pytest.mark.parametrize("baseline", [OLD, None], ids=["same-bits", "no-baseline"])
    def test_inside_with_the_same_bits_passes(self, baseline: Case | None, changed: bool) -> None:
        assert judge(OLD, baseline, environment_changed=changed) == Judgement(OLD, Verdict.PASS)

    def test_inside_with_other_bits_drifts_when_the_environment_changed(self) -> None:
        found = judge(MOVED, OLD, environment_changed=True)
        detail = "inside its bound, bits moved by up to 3 ulp"
        assert found == Judgement(MOVED, Verdict.DRIFT, detail, ulps=3.0, moves={"4": 1})

    @pytest.mark.parametrize(
        ("rerun", "expected"),
        [
            (None, Verdict.REGRESSION),
            (MOVED, Verdict.REGRESSION),
            (AGAIN, Verdict.NONDETERMINISTIC),
        ],
        ids=["no-rerun", "rerun-agrees", "rerun-differs"],
    )
    def test_inside_with_other_bits_in_the_same_environment(
        self, rerun: Case | None, expected: Verdict
    ) -> None:
        found = judge(MOVED, OLD, environment_changed=False, rerun=rerun)
        assert (found.verdict, found.ulps) == (expected, 3.0)
        assert verdict.needs_rerun(MOVED, OLD, environment_changed=False)
        assert not verdict.needs_rerun(MOVED, OLD, environment_changed=True)

    def test_a_rerun_that_returns_to_the_baseline_is_nondeterministic(self) -> None:
        found = judge(MOVED, OLD, environment_changed=False, rerun=OLD)
        assert found.verdict is Verdict.NONDETERMINISTIC

    @pytest.mark.parametrize("changed", [False, True], ids=["same-env", "changed-env"])
    @pytest.mark.parametrize("baseline", [None, OLD, case_of(**OUTSIDE)])
    def test_outside_is_a_regression_whatever_the_baseline_says(
        self, baseline: Case | None, changed: bool
    ) -> None:
        case = case_of(**OUTSIDE)
        found = judge(case, baseline, environment_changed=changed)
        assert found == Judgement(case, Verdict.REGRESSION, "beyond")
        assert not verdict.needs_rerun(case, baseline, environment_changed=changed)

    @pytest.mark.parametrize("baseline", [None, OLD])
    def test_what_did_not_run_is_unverified_never_a_pass(self, baseline: Case | None) -> None:
        case = case_of(outcome="unverified", reason="no compiler", known="a report")
        found = judge(case, baseline, environment_changed=False)
        assert found == Judgement(case, Verdict.UNVERIFIED, "no compiler")


class TestExceptions:
    @pytest.mark.parametrize(
        ("environment_changed", "expected"),
        [(True, Verdict.DRIFT), (False, Verdict.REGRESSION)],
    )
    def test_a_known_fault_that_goes_wrong_otherwise_has_moved(
        self, environment_changed: bool, expected: Verdict
    ) -> None:
        known: dict[str, Any] = {"outcome": "outside", "known": "a fault", "reason": "it is NaN"}
        old, new = replace(OLD, **known), replace(MOVED, **known)
        found = judge(new, old, environment_changed=environment_changed)
        assert found.verdict is expected
        assert judge(old, old, environment_changed=False).known == "a fault"

    @pytest.mark.parametrize("changed", [False, True], ids=["same-env", "changed-env"])
    def test_what_is_not_repeatable_by_nature_is_left_to_the_bound(self, changed: bool) -> None:
        case = case_of(4, not_repeatable=ATOMICS)
        found = judge(case, OLD, environment_changed=changed, rerun=AGAIN)
        assert (found.verdict, found.ulps) == (Verdict.PASS, 3.0)
        assert found.detail.endswith(f"not repeatable by nature: {ATOMICS}")
        assert not verdict.needs_rerun(case, OLD, environment_changed=False)
        outside = replace(case, outcome="outside")
        assert judge(outside, OLD, environment_changed=changed).verdict is Verdict.REGRESSION

    def test_a_known_fault_passes_and_keeps_its_report_and_reason(self) -> None:
        case = case_of(**OUTSIDE, known="issue 1")
        for baseline, changed in itertools.product((None, OLD), (False, True)):
            found = judge(case, baseline, environment_changed=changed)
            assert found == Judgement(case, Verdict.PASS, "beyond", known="issue 1")

    @pytest.mark.parametrize("baseline", [None, OLD, MOVED])
    def test_a_known_fault_that_passes_is_repaired(self, baseline: Case | None) -> None:
        found = judge(case_of(1, known="issue 1"), baseline, environment_changed=True)
        assert (found.repaired, found.known) == (True, "")
        assert found.verdict is (Verdict.DRIFT if baseline is MOVED else Verdict.PASS)

    def test_other_inputs_are_not_comparable(self) -> None:
        found = judge(case_of(4, inputs="new"), OLD, environment_changed=False)
        assert (found.verdict, found.comparable) == (Verdict.PASS, False)
        assert "not comparable" in found.detail

    @pytest.mark.parametrize(("old", "new"), [(True, False), (False, True), (False, False)])
    def test_explored_inputs_are_not_compared(self, old: bool, new: bool) -> None:
        found = judge(
            replace(MOVED, compared=new), replace(OLD, compared=old), environment_changed=False
        )
        assert (found.verdict, found.comparable) == (Verdict.PASS, True)

    def test_bits_are_those_of_all_tensors_with_dtype_and_shape(self) -> None:
        tensor = OLD.observed["value"]
        assert verdict.same_bits(OLD, case_of(1, margin=0.25))
        for observed in (
            {},
            {"other": tensor},
            {"value": tensor, "other": tensor},
            {"value": replace(tensor, dtype="int32")},
            {"value": replace(tensor, shape=(1, 1))},
        ):
            assert not verdict.same_bits(OLD, replace(OLD, observed=observed))

    def test_drift_without_a_size_is_still_drift(self) -> None:
        text = replace(OLD, observed={"value": observe(np.zeros(1, np.uint8), "text")})
        found = judge(text, OLD, environment_changed=True)
        assert (found.verdict, found.ulps) == (Verdict.DRIFT, None)


def record_of(*cases: Case, torch: str = "2.13.0", **changes: object) -> Record:
    whole = Record({"cpu": {"torch": torch}}, {case.id: case for case in cases})
    return replace(whole, **changes)  # type: ignore[arg-type]


class TestRecords:
    def test_without_a_baseline_all_that_holds_passes(self) -> None:
        assert judge_record(record_of(OLD), None) == [Judgement(OLD, Verdict.PASS)]

    @pytest.mark.parametrize(
        ("torch", "rerun", "expected"),
        [
            ("2.14.1", None, Verdict.DRIFT),
            ("2.13.0", MOVED, Verdict.REGRESSION),
            ("2.13.0", AGAIN, Verdict.NONDETERMINISTIC),
        ],
    )
    def test_environment_and_rerun_decide(
        self, torch: str, rerun: Case | None, expected: Verdict
    ) -> None:
        reruns = {rerun.id: rerun} if rerun else {}
        found = judge_record(record_of(MOVED, torch=torch), record_of(OLD), reruns)
        assert [j.verdict for j in found] == [expected]

    def test_a_device_that_only_one_side_has_counts_as_changed(self) -> None:
        here = record_of(OLD)
        elsewhere = replace(here, environment={"h100": {"torch": "2.13.0"}})
        assert not verdict.environment_changed(here, here, "cpu")
        assert verdict.environment_changed(here, elsewhere, "cpu")
        assert verdict.environment_changed(elsewhere, here, "cpu")

    def test_a_case_that_a_whole_run_lacks_is_unverified_and_asked_for(self) -> None:
        lost = case_of(name="lost")
        found = judge_record(record_of(OLD), record_of(OLD, lost))
        detail = "the baseline has this case, this run has not"
        assert found[1:] == [Judgement(lost, Verdict.UNVERIFIED, detail, missing=True)]
        assert exit_code(found) == 22

    def test_a_case_that_could_be_verified_before_and_cannot_be_now_is_asked_for(self) -> None:
        refused = replace(OLD, outcome="unverified", reason="torch refuses it")
        found = judge_record(record_of(refused), record_of(OLD))
        assert found == [Judgement(refused, Verdict.UNVERIFIED, "torch refuses it", missing=True)]
        assert exit_code(found) == 22
        assert exit_code(judge_record(record_of(refused), record_of(refused))) == 0

    @pytest.mark.parametrize(
        "run",
        [
            record_of(OLD, whole=False),
            record_of(OLD, complete=False),
            record_of(environment={"h100": {}}),
        ],
        ids=["narrowed", "interrupted", "no-such-device"],
    )
    def test_nothing_is_missing_where_it_was_not_to_run(self, run: Record) -> None:
        found = judge_record(run, record_of(OLD, case_of(name="lost")))
        assert not any(j.missing for j in found)

    @pytest.mark.parametrize(
        "old",
        [
            case_of(name="lost", outcome="unverified"),
            case_of(name="forward-call-error", outcome="outside", compared=False),
        ],
        ids=["not-run", "crashed"],
    )
    def test_what_the_baseline_never_measured_cannot_be_missing(self, old: Case) -> None:
        assert exit_code(judge_record(record_of(OLD), record_of(OLD, old))) == 0


def judged(shown: Verdict, margin: float = 0.5, **changes: object) -> Judgement:
    case = case_of(margin=margin, bound="exact" if margin in (0.0, math.inf) else "gelu_erf")
    return replace(Judgement(case, shown), **changes)  # type: ignore[arg-type]


PASS, DRIFT, REGRESSION, NONDETERMINISTIC = map(
    judged, (Verdict.PASS, Verdict.DRIFT, Verdict.REGRESSION, Verdict.NONDETERMINISTIC)
)
LOST = Judgement(case_of(error=True), Verdict.UNVERIFIED)
H100 = Judgement(case_of(device="h100", marks=("cuda", "h100", "hopper")), Verdict.UNVERIFIED)


class TestExitCode:
    def test_of_several_the_gravest_decides(self) -> None:
        by_gravity = [(21, NONDETERMINISTIC), (1, REGRESSION), (3, LOST), (22, H100), (20, DRIFT)]
        by_gravity.append((0, PASS))
        for length in range(1, 7):
            for chosen in itertools.combinations(by_gravity, length):
                judgements = [judgement for _, judgement in chosen]
                for order in (judgements, judgements[::-1]):
                    assert exit_code(order, drift_fails=True, asked=["h100"]) == chosen[0][0]

    def test_of_nothing_is_0(self) -> None:
        assert exit_code([]) == 0

    def test_drift_decides_only_by_policy(self) -> None:
        assert exit_code([PASS, DRIFT]) == 0
        assert exit_code([PASS, DRIFT], drift_fails=True) == 20

    @pytest.mark.parametrize(
        ("asked", "code"),
        [((), 0), (("h100",), 22), (("hopper",), 22), (("a100", "cuda"), 22), (("a100",), 0)],
    )
    def test_unverified_decides_only_where_a_mark_of_the_case_was_asked_for(
        self, asked: tuple[str, ...], code: int
    ) -> None:
        assert exit_code([PASS, H100], asked=asked) == code

    def test_known_and_repaired_leave_it_at_0(self) -> None:
        assert exit_code([replace(PASS, known="issue 1"), replace(PASS, repaired=True)]) == 0

    def test_every_code_has_a_meaning(self) -> None:
        assert sorted(verdict.EXIT_MEANING) == [0, 1, 2, 3, 20, 21, 22, 23, 24]


EXACT = judged(Verdict.PASS, 0.0)
BROKEN = judged(Verdict.REGRESSION, math.inf)
KNOWN = judged(Verdict.PASS, 9.0, known="issue 1")


class TestMatrix:
    @pytest.mark.parametrize(
        ("judgements", "text"),
        [
            ([], "-"),
            ([PASS], "PASS 0.5"),
            ([PASS, judged(Verdict.PASS, 0.98765)], "PASS 0.99"),
            ([EXACT], "PASS exact"),
            ([EXACT, PASS], "PASS 0.5"),
            ([EXACT, BROKEN], "REGRESSION inf"),
            ([PASS, judged(Verdict.DRIFT, 0.25)], "DRIFT 0.5"),
            ([DRIFT, NONDETERMINISTIC], "NONDETERMINISTIC 0.5"),
            ([NONDETERMINISTIC, REGRESSION, PASS, H100], "REGRESSION 0.5 (1 unverified)"),
            ([H100], "UNVERIFIED"),
            ([H100, H100, PASS], "PASS 0.5 (2 unverified)"),
            ([KNOWN, KNOWN], "PASS (2 known)"),
            ([KNOWN, PASS, EXACT], "PASS 0.5 (1 known)"),
            ([KNOWN, EXACT, H100], "PASS exact (1 known, 1 unverified)"),
        ],
    )
    def test_cell(self, judgements: list[Judgement], text: str) -> None:
        assert cell(judgements) == cell(judgements[::-1]) == text

    def test_rows_are_nodes_in_the_order_of_the_step_and_what_was_not_run_is_a_dash(self) -> None:
        def at(node: str, promise: str) -> Judgement:
            return Judgement(case_of(node=node, promise=promise), Verdict.PASS)

        found = matrix([at("weight_update", "flow"), at("gelu", "op"), at("seed_layers", "bound")])
        assert list(found) == [n for n in NODE_IDS if n in found]
        assert found == {
            "seed_layers": {"bound": "PASS 0.5", "op": "-", "flow": "-"},
            "gelu": {"bound": "-", "op": "PASS 0.5", "flow": "-"},
            "weight_update": {"bound": "-", "op": "-", "flow": "PASS 0.5"},
        }

    def test_what_lies_beyond_the_nodes_has_a_table_of_its_own(self) -> None:
        found = [
            Judgement(case_of(node="end_to_end", promise="sharding"), Verdict.PASS),
            Judgement(case_of(node="gelu", promise="op"), Verdict.PASS),
        ]
        assert list(matrix(found)) == ["gelu"]
        assert areas(found) == {("end_to_end", "sharding"): "PASS 0.5"}


@pytest.mark.parametrize(
    ("module", "class_name", "place"),
    [
        ("test_gelu", "TestOp", ("gelu", "op")),
        ("test_gelu", "TestElse", ("gelu", "")),
        ("test_end_to_end", "TestOp", ("end_to_end", "whole")),
        ("test_end_to_end_sharding", "", ("end_to_end", "sharding")),
    ],
)
def test_a_check_stands_where_its_module_and_class_say(
    module: str, class_name: str, place: tuple[str, str]
) -> None:
    assert place_of(module, class_name) == place
