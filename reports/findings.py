"""What a report says, found in a record alone; how it looks is for the writers beside this module.

Every writer (page, pdf, markdown, junit) shows the same :class:`Findings`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fixtures import verdict
from fixtures.devices import PRETENDED
from fixtures.environment import changed_fields, environment_id, is_pretended
from fixtures.record import Record
from fixtures.summary import environment_line
from fixtures.verdict import EXIT_MEANING, Judgement, Verdict, judgements_of
from reports.actions import Action, actions_for
from reports.heat import HeatMap, heat_maps
from reports.indicators import FAILED, Indicator, beyond, count, indicators

Change = tuple[str, str, Any, Any]
"""Device, field, value in the baseline, value here."""


@dataclass(frozen=True)
class Finding:
    """A case that a person has to look at, and how to see it again."""

    id: str
    verdict: str
    detail: str
    rerun: str
    margin: float
    ulps: float | None = None
    moves: Mapping[str, int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The detail in one line that a table can hold."""
        return cut(self.detail.partition("\n")[0], 300)


@dataclass(frozen=True)
class Statement:
    """What is said about the precision of training, and what this run found of it.

    Attributes:
        number: in the ledger, docs/claims.md.
        ruling: true or not, in the ledger's words; ``note``: what was measured.
        verdict: whether the ruling is the ledger's.
    """

    number: int
    says: str
    ruling: str
    note: str
    verdict: str


@dataclass(frozen=True)
class Findings:
    """All that a report says.

    Attributes:
        headline: the verdict in one sentence.
        tone: ``good``, ``bad`` or ``unsure``.
        banners: what has to be known before anything is believed.
        facts: name and value of what identifies the run.
        environment: device, its one line, its fields.
        changed: what differs from the baseline's environment.
        indicators, beyond: Part A.
        heat: Part B.
        actions: Part C.
        failures, drift: cases, worst first.
        known: sentence, number of cases, their ids.
        unverified: reason, places with their numbers of cases.
        statements: those that the run tried, by number.
        score: of the deliberate faults, as ``make faults`` left it; empty where it did not run.
        rerun: one command that measures again all that failed.
    """

    title: str
    headline: str
    tone: str
    code: int
    banners: Sequence[str]
    facts: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, str, Mapping[str, Any]]]
    baseline: str
    changed: Sequence[Change]
    indicators: Sequence[Indicator]
    beyond: Sequence[Indicator]
    heat: Sequence[HeatMap]
    actions: Sequence[Action]
    failures: Sequence[Finding]
    drift: Sequence[Finding]
    unmoved: int
    known: Sequence[tuple[str, int, Sequence[str]]]
    repaired: Sequence[Finding]
    incomparable: Sequence[str]
    unverified: Sequence[tuple[str, Sequence[tuple[str, int]]]]
    statements: Sequence[Statement]
    score: Mapping[str, Any]
    warnings: Sequence[str]
    rerun: str
    judgements: Sequence[Judgement]
    durations: Mapping[str, float]


def find(
    record: Record, *, title: str, score: Mapping[str, Any] | None = None, baseline: str = ""
) -> Findings:
    """What the run of a record found."""
    concluded = record.verdict
    code = int(concluded.get("exit_code", verdict.EXIT_INTERRUPTED))
    changed = [
        (device, name, before, now)
        for device, fields in concluded.get("changed", {}).items()
        for name, (before, now) in fields.items()
    ]
    return _found(
        record,
        judgements_of(record),
        code,
        title=title,
        baseline=baseline or concluded.get("baseline", "none"),
        changed=changed,
        score=score or {},
    )


def compare(old: Record, new: Record, *, title: str, baseline: str) -> Findings:
    """What differs between two records, from one machine or two."""
    judgements = verdict.judge_record(new, old)
    changed = [
        (device, name, before, now)
        for device, fields in new.environment.items()
        for name, (before, now) in changed_fields(old.environment.get(device, {}), fields).items()
    ]
    return _found(
        new,
        judgements,
        verdict.exit_code(judgements),
        title=title,
        baseline=baseline,
        changed=changed,
        score={},
    )


def _found(
    record: Record,
    judgements: Sequence[Judgement],
    code: int,
    *,
    title: str,
    baseline: str,
    changed: Sequence[Change],
    score: Mapping[str, Any],
) -> Findings:
    pretended = is_pretended(record.environment)
    by_default = [f"--inject={record.injected}"] if record.injected else []
    options = record.run.get("options", by_default)
    again = "".join(f" {shlex.quote(str(option))}" for option in options)
    failed = [j for j in judgements if j.verdict in FAILED]
    failed.sort(key=lambda j: -j.case.margin)
    drift = [j for j in judgements if j.verdict is Verdict.DRIFT]
    drift.sort(key=lambda j: -(j.ulps or 0.0))
    unverified = [j for j in judgements if j.verdict is Verdict.UNVERIFIED]
    tests = list(dict.fromkeys(j.case.test for j in failed if j.case.test))
    return Findings(
        title=title,
        headline=f"{PRETENDED} GPU: " * pretended + _headline(record, judgements, code),
        tone=_tone(record, judgements, code),
        code=code,
        banners=_banners(record),
        facts=_facts(record, judgements),
        environment=[
            (device, _line(device, fields), fields) for device, fields in record.environment.items()
        ],
        baseline=baseline,
        changed=changed,
        indicators=indicators(judgements),
        beyond=beyond(judgements),
        heat=heat_maps(judgements),
        actions=actions_for(
            judgements, changed=changed, code=code, complete=record.complete, rerun=again
        ),
        failures=[_finding(j, again) for j in failed],
        drift=[_finding(j, again) for j in drift],
        unmoved=sum(j.verdict is Verdict.PASS for j in judgements),
        known=_known(judgements),
        repaired=[_finding(j, again) for j in judgements if j.repaired],
        incomparable=[j.case.id for j in judgements if not j.comparable],
        unverified=_unverified(unverified),
        statements=_statements(judgements),
        score=score,
        warnings=list(record.run.get("warnings", [])),
        rerun=rerun_command(tests, again) if tests else "",
        judgements=judgements,
        durations=record.run.get("durations", {}),
    )


def rerun_command(tests: Iterable[str], options: str = "") -> str:
    """The command that measures tests again, quoted for a shell."""
    return "python -m pytest " + " ".join(shlex.quote(test) for test in tests) + options


def cut(text: str, most: int) -> str:
    """At most ``most`` characters of a text."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _finding(judgement: Judgement, again: str) -> Finding:
    case = judgement.case
    rerun = rerun_command([case.test], again) if case.test else ""
    detail = judgement.detail or case.known
    return Finding(
        case.id,
        judgement.verdict.value,
        detail,
        rerun,
        case.margin,
        judgement.ulps,
        judgement.moves,
    )


def _statements(judgements: Iterable[Judgement]) -> list[Statement]:
    found = []
    for judgement in judgements:
        figures = judgement.case.figures
        if "says" in figures:
            says, ruling, note = (str(figures.get(n, "")) for n in ("says", "ruling", "note"))
            number, shown = int(figures["number"]), judgement.verdict.value
            found.append(Statement(number, says, ruling, note, shown))
    return sorted(found, key=lambda statement: statement.number)


# --- the verdict in one sentence ----------------------------------------------------------------


def _headline(record: Record, judgements: Sequence[Judgement], code: int) -> str:
    counts = Counter(j.verdict for j in judgements)
    failed = sum(counts[v] for v in FAILED)
    if record.injected:
        return f"INJECTED {record.injected}: " + _headline(
            replace(record, injected=""), judgements, code
        )
    verified = sum(n for v, n in counts.items() if v is not Verdict.UNVERIFIED)
    torch = ", ".join(dict.fromkeys(_framework(fields) for fields in record.environment.values()))
    if not record.complete:
        return f"Interrupted after {count(len(judgements), 'case')}: no verdict on {torch}"
    if code == verdict.EXIT_GOLDEN:
        return "The golden store is damaged: nothing that was measured can be judged"
    if failed:
        nodes = list(dict.fromkeys(j.case.node for j in judgements if j.verdict in FAILED))
        places = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
        old = verdict.outlived_among(judgements)
        return f"{failed} of {count(verified, 'case')} fail on {torch}: {places}" + (
            f"; {old}" if old else ""
        )
    if code:
        return f"{EXIT_MEANING.get(code, f'pytest ended with {code}')} ({torch})"
    moved = counts[Verdict.DRIFT]
    held = f"All {verified} verified cases hold on {torch}"
    return held + (f"; {moved} moved inside their bounds" if moved else "")


def _framework(fields: Mapping[str, Any]) -> str:
    own = [
        f"{str(value).partition(' ')[0]} as its {name.removeprefix('implementation_')}"
        for name, value in fields.items()
        if name.startswith("implementation_")
    ]
    torch = f"torch {fields.get('torch', 'of no known version')}"
    return torch + (f" with {', '.join(own)}" if own else "")


def _tone(record: Record, judgements: Sequence[Judgement], code: int) -> str:
    if not record.complete:
        return "unsure"
    if any(j.verdict in FAILED for j in judgements) or code not in (0, verdict.EXIT_PROPOSED):
        return "bad"
    return "good"


def _banners(record: Record) -> list[str]:
    banners = []
    if record.injected:
        banners.append(
            f"INJECTED: this run was made under the deliberate fault {record.injected}; it proves "
            "that a check can fail and says nothing about this machine"
        )
    if is_pretended(record.environment):
        banners.append(
            f"{PRETENDED}: the GPU of this run is a device in Python; it rehearses the checks and "
            "says nothing about a real one"
        )
    if not record.complete:
        banners.append(
            "INCOMPLETE: the run was interrupted or crashed; this is what was measured until then"
        )
    elif not record.whole:
        banners.append("A selection of the checks ran; what is missing here was not asked for")
    return banners


def _facts(record: Record, judgements: Sequence[Judgement]) -> list[tuple[str, str]]:
    run = record.run
    counts = Counter(j.verdict.value for j in judgements)
    command = [str(word) for word in run.get("command", [])]
    if command and command[0].endswith("pytest/__main__.py"):
        command[:1] = ["python", "-m", "pytest"]
    known = sum(1 for j in judgements if j.known)
    facts = [
        ("cases", ", ".join(f"{counts[v.value]} {v.value}" for v in Verdict if counts[v.value])),
        ("known faults", f"{known} cases, counted as PASS or DRIFT" if known else "none met"),
        ("began", str(run.get("time", ""))),
        ("took", f"{run['seconds']:.0f} s" if "seconds" in run else ""),
        ("host", str(run.get("host", ""))),
        ("command", shlex.join(command)),
    ]
    return [(name, value) for name, value in facts if value]


def _line(device: str, fields: Mapping[str, Any]) -> str:
    if "torch" in fields:
        return environment_line(device, fields)
    return f"{device}: environment {environment_id(fields)}"


# --- lists --------------------------------------------------------------------------------------


def _known(judgements: Iterable[Judgement]) -> list[tuple[str, int, Sequence[str]]]:
    found: dict[str, list[str]] = {}
    for judgement in judgements:
        if judgement.known:
            found.setdefault(judgement.known, []).append(judgement.case.id)
    return [(what, len(ids), ids) for what, ids in found.items()]


def _unverified(
    judgements: Iterable[Judgement],
) -> list[tuple[str, Sequence[tuple[str, int]]]]:
    reasons: dict[str, Counter[str]] = {}
    for judgement in judgements:
        place = f"{judgement.case.node} {judgement.case.promise}"
        # What a rank said follows in further lines: the record and junit.xml have them.
        what = judgement.detail.partition("\n")[0]
        reason = f"could not be measured: {what}" if judgement.case.error else judgement.detail
        reasons.setdefault(reason, Counter())[place] += 1
    return [(reason, list(places.items())) for reason, places in reasons.items()]


def power_label(key: str) -> str:
    """A power of two as it is read: 1, 2, 1024, and 2^20 for the large ones."""
    if key == "inf":
        return "not finite"
    value = int(key)
    return key if value <= 1024 else f"2^{value.bit_length() - 1}"


def all_moves(findings: Findings) -> Counter[str]:
    """How many positions moved by how much, over all cases that drifted."""
    moves: Counter[str] = Counter()
    for finding in findings.drift:
        moves.update(finding.moves)
    return moves
