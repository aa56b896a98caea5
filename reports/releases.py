"""One table of releases and nodes, from the records of real runs. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.version import Version

from fixtures.known_faults import known_fault
from fixtures.nodes import AREA_IDS, NODE_IDS
from fixtures.record import Case, Record, RecordError
from fixtures.verdict import Judgement, Verdict, judge_record, outlived, worst

_WORDS = {Verdict.UNVERIFIED: "unverified", Verdict.REGRESSION: "red"}


def lines(records: Iterable[Record]) -> list[str]:
    """Markdown: a column per release, oldest first, a row per node and area.

    Several records of one release are one column. A test that a later record has too is that of
    the later one. A known fault whose row was added since is known.
    """
    columns = {release: _judged(found) for release, found in _by_release(records).items()}
    head = ["node", *columns]
    rows = [[node, *(cell(found.get(node, ())) for found in columns.values())] for node in NODE_IDS]
    for area in AREA_IDS:
        found = [column.get(area, ()) for column in columns.values()]
        if any(found):
            rows.append([area, *map(cell, found)])
    counts = [str(sum(len(found) for found in column.values())) for column in columns.values()]
    return [_row(text) for text in (head, ["---"] * len(head), *rows, ["cases", *counts])]


def cell(judgements: Sequence[Judgement]) -> str:
    """The worst verdict of a node, and how many of its cases are known, unverified or red.

    UNVERIFIED where nothing was verified.
    """
    if not judgements:
        return "-"
    verified = [j for j in judgements if j.verdict is not Verdict.UNVERIFIED]
    shown = worst(verified or judgements).verdict
    notes = [f"{known} known"] if (known := sum(1 for j in judgements if j.known)) else []
    for verdict, word in _WORDS.items():
        count = sum(1 for j in judgements if j.verdict is verdict)
        if count and not (verdict is shown is Verdict.UNVERIFIED):
            notes.append(f"{count} {word}")
    if old := outlived(judgements).total():
        notes.append(f"{old} of them known of earlier releases")
    return shown.value + (f" ({', '.join(notes)})" if notes else "")


def _by_release(records: Iterable[Record]) -> Mapping[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        releases = {str(fields.get("torch")) for fields in record.environment.values()}
        if len(releases) != 1 or record.injected:
            raise RecordError("a table of releases takes honest records of one torch each")
        found.setdefault(releases.pop(), []).append(record)
    return dict(sorted(found.items(), key=lambda entry: Version(entry[0])))


def _judged(records: Sequence[Record]) -> Mapping[str, list[Judgement]]:
    """By node, without what a baseline says: each release alone."""
    cases: dict[str, Case] = {}
    for record in records:
        again = {case.test for case in record.cases.values()}
        cases = {k: c for k, c in cases.items() if c.test not in again} | dict(record.cases)
    by_node: dict[str, list[Judgement]] = {}
    latest = records[-1]
    cases = {name: _with_row(case, latest.environment[case.device]) for name, case in cases.items()}
    for judged in judge_record(replace(latest, cases=cases), None):
        by_node.setdefault(judged.case.node, []).append(judged)
    return by_node


def _with_row(case: Case, environment: Mapping[str, Any]) -> Case:
    if case.outcome != "outside" or case.known:
        return case
    row = known_fault(case.id, environment, case.figures.get("wrong", ()))
    return replace(case, known=row.what) if row else case


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
