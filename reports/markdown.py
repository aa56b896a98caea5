"""``summary.md``: what a CI job's page shows. Needs no torch and no other library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fixtures.nodes import PROMISES
from reports.findings import Finding, Findings
from reports.indicators import Indicator

SHOWN = 20
"""Cases of one kind; CI limits what a job's page may hold, the page holds them all."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~!&$])")


def text(value: object) -> str:
    """Anything on one line, with nothing in it that Markdown or HTML would take for its own."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))


def code(value: object) -> str:
    """Anything on one line as code; a backtick cannot end it, a pipe ends no cell."""
    line = " ".join(str(value).split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    space = " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def markdown(findings: Findings) -> str:
    """The whole file."""
    parts = [
        *(f"**{text(banner)}**\n" for banner in findings.banners),
        f"# {text(findings.headline)}\n",
        f"Exit code **{findings.code}**, baseline: {text(findings.baseline)}\n",
        *(f"* {text(line)}" for _, line, _ in findings.environment),
        *(f"* {name}: {text(value)}" for name, value in findings.facts if name != "command"),
        "",
        *_cases("Failed", findings.failures),
    ]
    if findings.failures:
        parts += ["```sh", _short(findings.rerun), "```", ""]
    parts += _matrix(findings)
    parts += _actions(findings)
    if findings.changed:
        parts += [
            "## Changed in the environment\n",
            "| field | baseline | here |",
            "| --- " * 3 + "|",
        ]
        parts += [
            f"| {text(device)} {text(name)} | {text(old)} | {text(new)} |"
            for device, name, old, new in findings.changed
        ]
        parts.append("")
    parts += _drift(findings.drift)
    if findings.known:
        parts.append("<details><summary>Known faults of this release</summary>\n")
        parts += [f"* {count}: {text(what)}" for what, count, _ in findings.known]
        parts.append("\n</details>\n")
    parts += _cases("Repaired: known faults that pass here", findings.repaired)
    if findings.unverified:
        parts.append("## Unverified: would have run, could not\n")
        for reason, places in findings.unverified:
            counted = ", ".join(f"{place} ({count})" for place, count in places)
            parts.append(f"* {text(reason)}: {text(counted)}")
        parts.append("")
    if findings.statements:
        parts += ["## Statements tried\n", "| no. | statement | ruling | as the page |"]
        parts.append("| ---: | --- | --- | --- |")
        parts += [
            f"| {s.number} | {text(s.says)} | {text(s.ruling)} | {text(s.verdict)} |"
            for s in findings.statements
        ]
        parts.append("")
    if findings.score:
        score = findings.score["score"]
        parts.append(f"{score['caught']} of {score['faults']} deliberate faults are caught.\n")
    return "\n".join(parts)


def _short(rerun: str) -> str:
    return rerun if len(rerun) < 2000 else "python -m pytest --lf"


def _matrix(findings: Findings) -> list[str]:
    lines = ["| node | " + " | ".join(PROMISES) + " |", "| --- " * (len(PROMISES) + 1) + "|"]
    for row in findings.indicators:
        cells = [_cell(row.cells.get(promise)) for promise in PROMISES]
        lines.append(f"| {text(row.place)} | " + " | ".join(cells) + " |")
    if findings.beyond:
        lines += ["", "| beyond the nodes | |", "| --- | --- |"]
        lines += [f"| {text(row.title)} | {_cell(row)} |" for row in findings.beyond]
    return [*lines, ""]


def _cell(cell: Indicator | None) -> str:
    return text(cell.cell) if cell else "-"


def _cases(title: str, found: Sequence[Finding]) -> list[str]:
    if not found:
        return []
    lines = [f"## {title} ({len(found)})\n"]
    lines += [
        f"* {finding.verdict} {code(finding.id)}: {text(finding.line)}" for finding in found[:SHOWN]
    ]
    return [*lines, *_more(found), ""]


def _drift(found: Sequence[Finding]) -> list[str]:
    if not found:
        return []
    lines = [f"## Moved inside their bounds ({len(found)})\n"]
    lines += ["| case | largest move (ulp) | error / bound |", "| --- | ---: | ---: |"]
    for finding in found[:SHOWN]:
        ulps = "-" if finding.ulps is None else f"{finding.ulps:.3g}"
        lines.append(f"| {code(finding.id)} | {ulps} | {finding.margin:.3g} |")
    return [*lines, *_more(found), ""]


def _more(found: Sequence[Finding]) -> list[str]:
    return [f"\n... and {len(found) - SHOWN} more in report.html"] if len(found) > SHOWN else []


def _actions(findings: Findings) -> list[str]:
    own = [action for action in findings.actions if not action.known]
    if not own:
        return []
    rows: Iterable[str] = (
        f"1. **{text(action.finding)}**: {code(action.do)}: {text(action.why)}" for action in own
    )
    return ["## What to do\n", *rows, ""]
