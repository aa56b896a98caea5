"""The text that a run ends with, literally: what a person reads first must not rot."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import summary, verdict
from fixtures.environment import environment_id
from fixtures.record import Case, Record
from fixtures.run import Run
from fixtures.verdict import Judgement, Verdict

ENVIRONMENT = {"cpu": {"torch": "2.14.1", "cpu": "EPYC", "isa": "avx512", "threads": 1}}


def judged(shown: Verdict = Verdict.PASS, detail: str = "", **changes: Any) -> Judgement:
    """A judgement; ``changes`` are fields of its case or of itself."""
    of_case = {k: changes.pop(k) for k in list(changes) if k in Case.__dataclass_fields__}
    case = replace(Case("gelu", "op", "forward", "cpu", margin=0.5, bound="gelu_erf"), **of_case)
    excused = "" if changes.get("repaired") else case.known
    return Judgement(case, shown, detail, known=excused, **changes)


def section(*judgements: Judgement, **changes: Any) -> str:
    """The section as text, of a run that is whole and clean but for the changes."""
    changes = {"written": Path("reports/runs/now"), "exit_code": 0, **changes}
    run = Run(ENVIRONMENT, "", (), False, None, Path(), judgements=list(judgements), **changes)
    return "\n".join(summary.lines(run)) + "\n"


def text(block: str) -> str:
    return textwrap.dedent(block).removeprefix("\n")


def test_a_clean_run_is_its_matrix_its_record_and_its_verdict() -> None:
    exact = judged(node="all_reduce", promise="flow", margin=0.0, bound="exact")
    assert section(judged(), judged(promise="bound", margin=0.98), exact) == text(
        """
        node        bound      op        flow
        ----------  ---------  --------  ----------
        gelu        PASS 0.98  PASS 0.5  -
        all_reduce  -          -         PASS exact
        (verdict, then worst observed error / bound)

        record: reports/runs/now
        verdict: every verified case holds (exit code 0)
        """
    )


def test_drift_says_what_moved_by_how_much_and_which_fields_changed() -> None:
    detail = "inside its bound, bits moved by up to 3 ulp"
    old = {"cpu": {**ENVIRONMENT["cpu"], "torch": "2.13.0", "mkl": "2024.2"}}
    drift = judged(Verdict.DRIFT, detail, dtype="bf16", ulps=3.0)
    assert section(judged(), drift, baseline=Record(old, {})) == text(
        """
        node  bound  op         flow
        ----  -----  ---------  ----
        gelu  -      DRIFT 0.5  -
        (verdict, then worst observed error / bound)

        drift (1):
          DRIFT            gelu/op/forward/cpu/bf16: inside its bound, bits moved by up to 3 ulp

        changed in the environment:
          cpu mkl: 2024.2 -> None
          cpu torch: 2.13.0 -> 2.14.1

        record: reports/runs/now
        verdict: every verified case holds (exit code 0)
        """
    )


def test_failures_show_the_first_line_of_their_reason() -> None:
    found = section(
        judged(Verdict.REGRESSION, "beyond by a factor of 7\n  worst at ...", margin=7.0),
        judged(Verdict.NONDETERMINISTIC, "bits moved, and again", promise="flow"),
        exit_code=21,
    )
    assert found == text(
        """
        node  bound  op            flow
        ----  -----  ------------  --------------------
        gelu  -      REGRESSION 7  NONDETERMINISTIC 0.5
        (verdict, then worst observed error / bound)

        outside their bound or moved without a reason (2):
          REGRESSION       gelu/op/forward/cpu: beyond by a factor of 7
          NONDETERMINISTIC gelu/flow/forward/cpu: bits moved, and again

        record: reports/runs/now
        verdict: NONDETERMINISTIC: a repeatable case differs from itself (exit code 21)
        """
    )


def test_known_faults_are_counted_by_report_and_repaired_ones_listed() -> None:
    found = section(
        judged(known="NaN at inf [issue 1]", margin=9.0),
        judged(known="NaN at inf [issue 1]", name="again"),
        judged(known="a lost momentum [issue 2]", name="other"),
        judged(known="0 * inf [issue 3]", name="mended", repaired=True),
    )
    assert found == text(
        """
        node  bound  op                  flow
        ----  -----  ------------------  ----
        gelu  -      PASS 0.5 (3 known)  -
        (verdict, then worst observed error / bound)

        known faults of this release, each with the cases that it explains:
            2  NaN at inf [issue 1]
            1  a lost momentum [issue 2]

        REPAIRED: known faults that pass here (1):
          PASS             gelu/op/mended/cpu: 0 * inf [issue 3]

        record: reports/runs/now
        verdict: every verified case holds (exit code 0)
        """
    )


def test_unverified_names_each_reason_with_what_would_have_run() -> None:
    absent = "no h100 device is visible (visible: cpu)"
    found = section(
        *(judged(Verdict.UNVERIFIED, absent, name=name) for name in "ab"),
        judged(Verdict.UNVERIFIED, absent, promise="flow"),
        judged(Verdict.UNVERIFIED, "no compiler", promise="flow"),
        judged(),
        exit_code=22,
    )
    assert found == text(
        """
        node  bound  op                       flow
        ----  -----  -----------------------  ----------
        gelu  -      PASS 0.5 (2 unverified)  UNVERIFIED
        (verdict, then worst observed error / bound)

        UNVERIFIED: would have run, could not:
          no h100 device is visible (visible: cpu): gelu op (2), gelu flow (1)
          no compiler: gelu flow (1)

        record: reports/runs/now
        verdict: UNVERIFIED: something that was asked for could not be checked (exit code 22)
        """
    )


def test_what_cannot_be_compared_is_listed() -> None:
    found = section(judged(detail="inputs differ: not comparable", comparable=False))
    assert (
        text(
            """
        not comparable with the baseline (1):
          PASS             gelu/op/forward/cpu: inputs differ: not comparable
        """
        )
        in found
    )


def test_damage_of_the_store_and_warnings_are_said_once_each() -> None:
    found = section(
        judged(),
        golden_errors=["gelu.safetensors is missing; restore it", "manifest"] * 2,
        warnings=["a deprecation", "a deprecation", "another"],
        notes=["proposed in golden/.staging"],
        exit_code=23,
    )
    assert found.partition("bound)\n")[2] == text(
        """

        golden store:
          gelu.safetensors is missing; restore it
          manifest

        2 distinct warnings recorded in run.json

        proposed in golden/.staging
        record: reports/runs/now
        verdict: the golden store is damaged (exit code 23)
        """
    )


def test_an_interrupted_run_gives_no_verdict() -> None:
    assert section(judged(), complete=False).partition("bound)\n")[2] == text(
        """

        record: reports/runs/now
        interrupted: the record holds what was measured so far, marked incomplete
        """
    )


def test_a_record_that_was_not_written_is_an_error_with_its_remedy() -> None:
    error = "the record was not written to x: No space left on device; free space"
    found = section(judged(), written=None, write_error=error, exit_code=3)
    assert found.partition("bound)\n")[2] == text(
        f"""

        error: {error}
        verdict: {verdict.EXIT_MEANING[3]} (exit code 3)
        """
    )


def test_long_lists_end_with_how_many_more_there_are() -> None:
    found = section(*(judged(Verdict.DRIFT, name=f"case{i:02}") for i in range(15)))
    assert "drift (15):\n" in found
    assert "gelu/op/case11/cpu" in found
    assert "gelu/op/case12/cpu" not in found
    assert "\n  ... and 3 more in the record\n" in found


def test_the_table_of_drift_has_the_largest_moves_first() -> None:
    table = summary.drift_table(
        [
            judged(Verdict.DRIFT, name="unsized"),
            judged(Verdict.DRIFT, name="small", ulps=1.0, margin=0.25),
            judged(),
            judged(Verdict.DRIFT, name="large", ulps=4096.0),
        ]
    )
    assert [line.split() for line in table[1:]] == [
        ["gelu/op/large/cpu", "4096", "0.5"],
        ["gelu/op/small/cpu", "1", "0.25"],
        ["gelu/op/unsized/cpu", "-", "0.5"],
    ]
    assert table[0] == "case                 moved by (ulp)  error / bound"


def test_environment_lines_of_the_header() -> None:
    cpu = ENVIRONMENT["cpu"]
    line = f"cpu: torch 2.14.1, EPYC, avx512, 1 thread, environment {environment_id(cpu)}"
    assert summary.environment_line("cpu", cpu) == line
    gpu = {"torch": "2.14.1", "gpu": "NVIDIA H200", "driver": "580.95.05", "cuda": "13.0"}
    line = "h200: torch 2.14.1, NVIDIA H200, 580.95.05, 13.0, environment "
    assert summary.environment_line("h200", gpu).startswith(line)


def test_a_device_that_the_baseline_lacks_is_one_line() -> None:
    changes = summary.environment_changes({}, ENVIRONMENT)
    assert changes == ["", "changed in the environment:", "  cpu: not in the baseline"]
    assert summary.environment_changes(ENVIRONMENT, ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("2.13.0+cpu", "2.14.1+cu130", "builds of two kinds (cpu, cu)"),
        ("2.13.0", "2.14.1+cpu", "builds of two kinds (unnamed, cpu)"),
        ("2.6.0+cu124", "2.14.1+cu130", ""),
        ("2.13.0+cpu", "2.14.1+cpu", ""),
        ("2.13.0", "2.14.1", ""),
    ],
)
def test_builds_of_two_kinds_are_told_apart_from_two_releases(
    old: str, new: str, said: str
) -> None:
    sides = [{"cpu": {"torch": version}} for version in (old, new)]
    changes = "\n".join(summary.environment_changes(*sides))
    assert said in changes
    assert ("note:" in changes) == bool(said)


def test_settings_of_the_host_are_listed_where_nothing_else_was_asked_for() -> None:
    here = judged(
        node="environment",
        promise="whole",
        name="host-clock-here",
        margin=0.0,
        bound="none: reported",
        figures={"report": "not synchronised"},
    )
    assert "clock    not synchronised\n" in section(here)
    assert "not synchronised" not in section(here, judged())
