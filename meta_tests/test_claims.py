"""docs/claims.md says what the ledger says, and a statement's ruling can change."""

from __future__ import annotations

from collections import Counter

import pytest

from fixtures import record
from fixtures.check import BoundExceededError, Check
from fixtures.claims import ledger
from fixtures.claims.claim import Claim, Found, Ruling, alike, ruled
from fixtures.record import Case
from precision_tests.test_claims import hold

FALSE_HERE = Claim(7, "gelu", "GELU is its own inverse.", Ruling.FALSE, measure=lambda: FOUND)
FOUND = Found(Ruling.CONFIRMED, "It is, here.")


@pytest.mark.parametrize("claim", ledger.CLAIMS, ids=lambda claim: claim.name)
class TestStatements:
    def test_has_a_way_to_settle_it(self, claim: Claim) -> None:
        assert claim.measure or claim.over_ranks or claim.on_gpu or claim.document

    def test_gives_a_figure_where_another_one_is_right(self, claim: Claim) -> None:
        assert claim.stated or claim.ruling is not Ruling.OTHER_FIGURE

    def test_needs_a_gpu_if_nothing_else_settles_it(self, claim: Claim) -> None:
        elsewhere = claim.measure or claim.over_ranks or claim.document
        assert (claim.ruling is Ruling.NEEDS_GPU) == (not elsewhere)


def test_the_page_is_the_ledger() -> None:
    """Apart from what a run found, which the page has from a record."""
    rows = [line for line in ledger.PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ") for line in rows[2:]]
    assert [[*row[:4], *row[-2:]] for row in cells] == [
        [*blank[:4], *blank[-2:]]
        for claim in ledger.CLAIMS
        for blank in [ledger.row(claim, "").strip("| ").split(" | ")]
    ]
    counts = Counter(claim.ruling for claim in ledger.CLAIMS)
    assert [line for line in ledger.PAGE.read_text().splitlines() if line.startswith("* ")] == [
        f"* {counts[ruling]} {ruling}" for ruling in Ruling if counts[ruling]
    ]


def test_another_ruling_turns_the_check_red() -> None:
    check = Check(Case("claims", "whole", "", "cpu"), {"torch": "2.13.0"})
    with pytest.raises(BoundExceededError, match=r"got 'confirmed'[\s\S]*note: It is, here\."):
        hold(check, FALSE_HERE, FOUND)


@pytest.mark.parametrize(
    ("statement", "figure", "expected"),
    [
        (True, True, Ruling.CONFIRMED),
        (True, False, Ruling.OTHER_FIGURE),
        (False, True, Ruling.NOT_REPRODUCED),
    ],
)
def test_a_ruling_follows_from_what_was_seen(
    statement: bool, figure: bool, expected: Ruling
) -> None:
    assert ruled(statement, figure=figure, otherwise=Ruling.NOT_REPRODUCED) is expected


def test_a_figure_holds_within_a_factor_of_two() -> None:
    assert all(alike(*pair) for pair in ((0.012, 0.023), (-1.0, -0.51)))
    assert not any(alike(*pair) for pair in ((0.012, 0.0059), (1.0, -1.0), (1.0, 0.0)))


def test_a_record_without_a_measurement_makes_no_page() -> None:
    run = record.Record({"cpu": {"torch": "2.13.0", "isa": "avx2"}}, {})
    with pytest.raises(ValueError, match="no measurement of claim_"):
        ledger.page(run)
