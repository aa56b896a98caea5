"""Part C: what to do about each finding. Needs no torch.

An action is a command or setting that exists, with its reason, for a person to try; nothing edits
anybody's files. What answers which finding stands in the tables of ``remedies``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fixtures import verdict
from fixtures.verdict import Judgement, Verdict
from reports.indicators import count
from reports.remedies import CHANGED, FAILED, KNOWN, UNVERIFIED, Remedy


@dataclass(frozen=True)
class Action:
    """One thing to do.

    Attributes:
        finding: what was found.
        do: the command or setting.
        why: its reason.
        urgent: it answers what decided the exit code.
        known: it avoids a known fault of the release, in a run that need not fail by it.
    """

    finding: str
    do: str
    why: str
    urgent: bool = False
    known: bool = False


def actions_for(
    judgements: Sequence[Judgement],
    *,
    changed: Iterable[tuple[str, str, Any, Any]],
    code: int,
    complete: bool,
    rerun: str,
) -> list[Action]:
    """What to do, most urgent first and what avoids known faults last; may be empty."""
    actions = []
    if not complete:
        actions.append(
            Action(
                "The run did not end by itself",
                "run it again",
                "an incomplete record has no verdict and cannot be a baseline; it shows what was "
                "measured until then",
                urgent=True,
            )
        )
    if code == verdict.EXIT_GOLDEN:
        actions.append(
            Action(
                "The golden store is damaged, or lacks what a check needs",
                "git status golden\ngit checkout -- golden\npython -m pytest --golden=verify",
                "the first shows what was changed, the second restores it, the last makes all "
                "truth anew and compares it byte by byte; the failures name file and case",
                urgent=True,
            )
        )
    failed = [j for j in judgements if j.verdict is Verdict.REGRESSION]
    if failed:
        where = " or ".join(dict.fromkeys(map(_where, failed)))
        actions.append(
            Action(
                f"{count(len(failed), 'case')} outside the bound, or moved without a reason",
                f"python -m pytest --lf{rerun}",
                f"measures just these again; an error that stays is in {where}, one that goes was "
                "not repeatable",
                urgent=True,
            )
        )
    actions += _failed_nodes([j for j in failed if _where(j) == FRAMEWORK])
    moved_alone = [j for j in judgements if j.verdict is Verdict.NONDETERMINISTIC]
    if moved_alone:
        actions.append(
            Action(
                f"{len(moved_alone)} cases differ from themselves: {moved_alone[0].case.id} ...",
                "torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8 "
                "set before CUDA starts",
                "operations that have a deterministic form take it, the others raise and so name "
                "themselves",
                urgent=True,
            )
        )
    drift = [j for j in judgements if j.verdict is Verdict.DRIFT]
    if drift:
        actions += _changed_fields(changed)
        actions.append(
            Action(
                f"{len(drift)} cases moved inside their bounds",
                "python -m pytest --golden=propose\n"
                "python -m pytest --golden=diff\n"
                "python -m pytest --golden=bless --reason '...'",
                "makes the new values this environment's baseline, once the move is understood; "
                "until then the old record stays the baseline (--baseline=DIR)",
                urgent=code == verdict.EXIT_DRIFT,
            )
        )
    actions += _known_faults(judgements)
    actions += _unverified(judgements, urgent=code == verdict.EXIT_UNVERIFIED)
    return sorted(actions, key=lambda action: (action.known, not action.urgent))


FRAMEWORK = "the framework or in what stands below it"


def _where(failed: Judgement) -> str:
    """Whose code a failing case ran: not torch's, where a kernel or a model of one's own did."""
    case = failed.case
    if case.node in case.figures.get("own_kernels", ()):
        return f"your own kernel of {case.node}"
    return "your model" if case.node == "model" else FRAMEWORK


def _failed_nodes(failed: Sequence[Judgement]) -> list[Action]:
    actions = []
    for remedy in FAILED:
        own = [j for j in failed if _covers(remedy, j.case.id)]
        if own:
            finding = f"{remedy.finding} ({len(own)} cases, {own[0].case.id})"
            actions.append(Action(finding, remedy.do, remedy.why, urgent=True))
    return actions


def _changed_fields(changed: Iterable[tuple[str, str, Any, Any]]) -> list[Action]:
    actions: dict[str, Action] = {}
    for device, name, before, now in changed:
        for remedy in CHANGED:
            if any(fnmatchcase(name, pattern) for pattern in remedy.patterns):
                finding = f"{device} {name}: {before} -> {now}"
                do = remedy.do.replace("{old}", str(before).partition("+")[0])
                actions.setdefault(remedy.do, Action(finding, do, remedy.why))
    return list(actions.values())


def _known_faults(judgements: Iterable[Judgement]) -> list[Action]:
    met: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        if judgement.known:
            met.setdefault(judgement.known, []).append(judgement)
    return [
        Action(what, remedy.do, remedy.why, known=True)
        for what, found in met.items()
        for remedy in KNOWN
        if any(_covers(remedy, judgement.case.id) for judgement in found)
    ]


def _unverified(judgements: Iterable[Judgement], *, urgent: bool) -> list[Action]:
    reasons = {
        judgement.detail: judgement
        for judgement in judgements
        if judgement.verdict is Verdict.UNVERIFIED
    }
    actions: dict[str, Action] = {}
    for reason, judgement in reasons.items():
        for remedy in UNVERIFIED:
            if any(fnmatchcase(reason, pattern) for pattern in remedy.patterns):
                what = f"UNVERIFIED: {reason.partition(chr(10))[0]}"
                mark = next((m for m in judgement.case.marks if m in reason), "h100")
                do = remedy.do.replace("{mark}", mark)
                actions.setdefault(do, Action(what, do, remedy.why, urgent))
    return list(actions.values())


def _covers(remedy: Remedy, case_id: str) -> bool:
    return any(fnmatchcase(case_id, pattern) for pattern in remedy.patterns)
