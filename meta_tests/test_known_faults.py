"""Known faults: which case on which release a row covers, and what every row must say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fixtures import known_faults
from fixtures.known_fault import KnownFault
from fixtures.known_faults import KNOWN_FAULTS, known_fault, outlived, stale
from fixtures.nodes import AREA_IDS, NODE_IDS, PROMISES

RELEASES = ("2.5.1", "2.6.0", "2.8.0", "2.10.0", "2.12.1", "2.13.0", "2.14.1")
ROW = KnownFault(
    cases=("gelu/op/huge-*/cpu/*/eager", "gelu/op/infinity/cpu/bf1?"),
    releases=">=2.5,<=2.14.1",
    where={},
    report="an issue",
    what="a defect",
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(*rows: KnownFault) -> None:
        monkeypatch.setattr(known_faults, "KNOWN_FAULTS", rows)

    return of


@pytest.mark.parametrize(
    ("case", "covered"),
    [
        ("gelu/op/huge-erf/cpu/fp32/eager", True),
        ("gelu/op/huge-erf/cpu/fp32/eager2", False),
        ("gelu/op/huge-erf/cuda/fp32/eager", False),
        ("gelu/op/huge/cpu/fp32/eager", False),
        ("gelu/op/infinity/cpu/bf16", True),
        ("gelu/op/infinity/cpu/bf1", False),
        ("GELU/op/infinity/cpu/bf16", False),
        ("weight_update/gelu/op/infinity/cpu/bf16", False),
    ],
)
def test_patterns_cover_whole_case_ids(table: Any, case: str, covered: bool) -> None:
    table(ROW)
    assert known_fault(case, {"torch": "2.13.0"}) is (ROW if covered else None)


@pytest.mark.parametrize(
    ("wrong", "covered"), [((), True), (["nan"], True), (["inf", "nan"], True), (["5.0"], False)]
)
def test_only_the_wrong_values_of_the_fault_are_excused(
    table: Any, wrong: list[str], covered: bool
) -> None:
    row = replace(ROW, got=("nan", "inf"))
    table(row)
    found = known_fault("gelu/op/huge-erf/cpu/fp32/eager", {"torch": "2.13.0"}, wrong)
    assert found is (row if covered else None)


@pytest.mark.parametrize(
    ("got", "wrong", "covered"),
    [
        (("*",), ["5.0", "False"], True),
        (("*",), ["5.0", "nan"], False),
        (("*",), ["-inf"], False),
        (("*", "-inf"), ["-inf", "5.0"], True),
        (("*inf",), ["-inf"], False),
    ],
)
def test_what_is_not_finite_has_to_be_named(
    table: Any, got: tuple[str, ...], wrong: list[str], covered: bool
) -> None:
    table(replace(ROW, got=got))
    found = known_fault("gelu/op/huge-erf/cpu/fp32/eager", {"torch": "2.13.0"}, wrong)
    assert bool(found) is covered


@pytest.mark.parametrize(
    ("release", "covered"),
    [
        ("2.4.1", False),
        ("2.5.0", True),
        ("2.13.0+cpu", True),
        ("2.14.1", True),
        ("2.14.1+cu130", True),
        ("2.14.2", False),
        ("2.14.0.dev20260401+cu130", True),
        ("2.15.0.dev2026", False),
        ("2.15.0a0+git1a2b3c4", False),
        ("2.15.0", False),
    ],
)
def test_ranges_ignore_the_local_part_and_hold_for_nightlies(
    table: Any, release: str, covered: bool
) -> None:
    table(ROW)
    found = known_fault("gelu/op/infinity/cpu/bf16", {"torch": release})
    assert found is (ROW if covered else None)


@pytest.mark.parametrize(
    ("environment", "covered"),
    [
        ({"isa": "avx2", "threads": 1}, True),
        ({"isa": "avx512", "threads": 1}, True),
        ({"isa": "default", "threads": 1}, False),
        ({"isa": "avx2", "threads": 2}, False),
        ({"isa": "avx2"}, False),
    ],
)
def test_every_field_of_where_must_have_one_of_its_values(
    table: Any, environment: dict[str, Any], covered: bool
) -> None:
    row = replace(ROW, where={"isa": ("avx2", "avx512"), "threads": (1,)})
    table(row)
    found = known_fault("gelu/op/infinity/cpu/bf16", {"torch": "2.13.0", **environment})
    assert found is (row if covered else None)


def test_the_first_row_that_covers_a_case_is_the_one(table: Any) -> None:
    other = replace(ROW, cases=("*",), report="another issue")
    table(replace(ROW, releases="<2"), other, ROW)
    assert known_fault("gelu/op/infinity/cpu/bf16", {"torch": "2.13.0"}) is other


def test_the_range_is_of_the_package_that_is_at_fault(table: Any) -> None:
    row = replace(ROW, package="lightning", releases=">=2.4,<=2.6.6")
    table(row)
    for release, found in (("2.6.6", row), ("2.6.7", None)):
        environment = {"torch": "2.6.6", "lightning": release}
        assert known_fault("gelu/op/infinity/cpu/bf16", environment) is found
    assert known_fault("gelu/op/infinity/cpu/bf16", {"torch": "2.6.6"}) is None


@pytest.mark.parametrize(
    ("releases", "release", "said"),
    [
        (">=2.5,<=2.14.1", "2.14.1+cpu", ""),
        (">=2.5,<=2.14.1", "2.15.0", "known up to 2.14.1, still wrong here: a defect [an issue]"),
        (">=2.5,<=2.14.1", "2.15.0.dev2026+cu130", "known up to 2.14.1, still wrong here"),
        (">=2.5,<2.14", "2.15.0", "known before 2.14, still wrong here"),
        (">=2.5,<2.14", "2.4.1", ""),
    ],
)
def test_a_release_past_the_range_is_told_which_fault_it_still_has(
    table: Any, releases: str, release: str, said: str
) -> None:
    table(replace(ROW, releases=releases, got=("nan",), where={"isa": ("avx2",)}))
    here = {"torch": release, "isa": "avx2"}
    found = outlived("gelu/op/infinity/cpu/bf16", here, ["nan"])
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert not outlived("gelu/op/infinity/cpu/bf16", here, ["5.0"])
    assert not outlived("gelu/op/other/cpu/bf16", here, ["nan"])
    assert not outlived("gelu/op/infinity/cpu/bf16", {**here, "isa": "avx512"}, ["nan"])


def test_a_pattern_in_force_that_covers_no_case_is_stale(table: Any) -> None:
    row = KnownFault(("gelu/op/*/cpu", "gelu/op/gone/*"), ">=2.5,<2.14", "report", "what")
    table(row)
    cases = ["gelu/op/forward/cpu"]
    assert stale(cases, [{"torch": "2.13.0+cpu"}]) == ["gelu/op/gone/*"]
    assert stale(cases, [{"torch": "2.14.0"}]) == []


@pytest.mark.parametrize("row", KNOWN_FAULTS, ids=lambda row: row.cases[0])
class TestEachRow:
    def test_has_a_report_and_a_sentence(self, row: KnownFault) -> None:
        assert re.search(r"\b(issue|pull) \d+\b|https://|no public report found", row.report)
        assert len(row.what.split()) > 4
        assert "\n" not in row.report + row.what

    def test_names_a_node_and_a_promise(self, row: KnownFault) -> None:
        for pattern in row.cases:
            node, promise, *rest = pattern.split("/")
            assert node in NODE_IDS + AREA_IDS
            assert promise in PROMISES or node in AREA_IDS
            assert rest

    def test_has_a_range_that_ends(self, row: KnownFault) -> None:
        """A release to come is an ordinary one: it has to show that it is wrong too."""
        releases = SpecifierSet(row.releases)
        assert row.package != "torch" or any(Version(r) in releases for r in RELEASES)
        assert Version("99.0") not in releases
        assert row.outlived({row.package: "99.0", **{k: v[0] for k, v in row.where.items()}})
