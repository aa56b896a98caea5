"""Part A: per node, and per part of an area, the case that comes nearest to its bound. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fixtures import verdict
from fixtures.nodes import AREAS, NODES, PROMISES
from fixtures.record import Case
from fixtures.verdict import Judgement, Verdict

FAILED = (Verdict.REGRESSION, Verdict.NONDETERMINISTIC)

_READABLE = 1000
"""Ulps that mean something: beyond, a sum has cancelled and its norm says more."""


@dataclass(frozen=True)
class Indicator:
    """One row of Part A: the worst case of a node, or of a part of an area.

    Attributes:
        title: what a person calls it.
        place: its id in records and marks.
        target: the bound, by the name of its theorem.
        measured: observed error over bound, and the error itself where it has a unit.
        margin: observed error over bound.
        verdict: the worst verdict.
        source: where the deviation comes from: the worst case, and its worst parameter.
        counted: cases, known faults and unverified ones.
        cell: verdict and margin as the terminal shows them.
        cells: of a node: promise to its row; empty for a part of an area.
    """

    title: str
    place: str
    target: str
    measured: str
    margin: float
    verdict: str
    source: str
    counted: str
    cell: str = "-"
    cells: Mapping[str, Indicator] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Inside its bound: a drift is."""
        return self.verdict in (Verdict.PASS, Verdict.DRIFT)


def indicators(judgements: Sequence[Judgement]) -> list[Indicator]:
    """One per node, in the order of a step: also those that were not measured."""
    rows = []
    for node in NODES:
        own = [j for j in judgements if j.case.node == node.id]
        cells = {
            promise: _indicator(f"{node.title}: {promise}", promise, found)
            for promise in PROMISES
            if (found := [j for j in own if j.case.promise == promise])
        }
        rows.append(_indicator(node.title, node.id, own, cells))
    return rows


def beyond(judgements: Sequence[Judgement]) -> list[Indicator]:
    """One per part of an area that was measured."""
    rows = []
    for area in AREAS:
        own = [j for j in judgements if j.case.node == area.id]
        for part in sorted({j.case.promise for j in own}):
            found = [j for j in own if j.case.promise == part]
            rows.append(_indicator(f"{area.id}: {part}", area.title, found))
    return rows


def _indicator(
    title: str,
    place: str,
    judgements: Sequence[Judgement],
    cells: Mapping[str, Indicator] | None = None,
) -> Indicator:
    counted = _counted(judgements)
    verified = [j for j in judgements if j.verdict is not Verdict.UNVERIFIED and not j.known]
    if not verified:
        shown = "UNVERIFIED" if judgements else "not measured"
        if any(j.known for j in judgements):
            shown = "PASS"
        why = judgements[0].detail.partition("\n")[0] if judgements else "no check of it was run"
        cell = verdict.cell(judgements)
        return Indicator(title, place, "-", "-", 0.0, shown, why, counted, cell, cells or {})
    worst = verdict.worst(verified)
    failed = worst.verdict in FAILED
    case = worst.case if failed else max((j.case for j in verified), key=lambda c: c.margin)
    return Indicator(
        title,
        place,
        target_of(case),
        measured_of(case),
        case.margin,
        worst.verdict.value,
        source_of(case),
        counted,
        verdict.cell(judgements),
        cells or {},
    )


def _counted(judgements: Sequence[Judgement]) -> str:
    known = sum(1 for j in judgements if j.known)
    unverified = sum(1 for j in judgements if j.verdict is Verdict.UNVERIFIED)
    notes = [f"{known} known"] * bool(known) + [f"{unverified} unverified"] * bool(unverified)
    return ", ".join([count(len(judgements), "case"), *notes])


def target_of(case: Case) -> str:
    """What a case is held to."""
    if not case.bound:
        return "an end without an exception"
    return "equal" if case.exact else f"error ≤ {case.bound}"


def measured_of(case: Case) -> str:
    """Observed error over bound, and the error itself."""
    if case.exact and case.margin == 0:
        return "equal"
    if math.isinf(case.margin):
        return "ended by an exception" if not case.figures else "not equal"
    figures, margin = case.figures, f"{case.margin:.3g} of its bound"
    worst, errors = figures.get("worst"), figures.get("errors")
    if isinstance(errors, Mapping) and worst in errors:
        return f"{margin}, error {errors[worst]:.2g}"
    ulps, normwise = (figures.get(name, math.inf) for name in ("max_ulp", "normwise"))
    if ulps <= _READABLE:
        return f"{margin}, {ulps:.3g} ulp"
    return f"{margin}, {normwise:.2g} normwise" if math.isfinite(normwise) else margin


def source_of(case: Case) -> str:
    """The case in words, and the parameter that deviates most."""
    where = ", ".join(part for part in (case.device, case.dtype, case.implementation) if part)
    worst = case.figures.get("worst")
    parameter = f" at {worst}" if isinstance(worst, str) and worst else ""
    return f"{case.promise}: {case.name} [{where}]{parameter}"


def count(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number} {what}{'s' if number != 1 else ''}"
