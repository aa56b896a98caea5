"""Records on the command line: ``python -m reports exit-code|render|compare|upgrade|releases``."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fixtures import gate, journal, record, summary, verdict
from fixtures.command_line import Parser
from fixtures.environment import two_builds
from fixtures.record import Record, RecordError
from fixtures.run import require_baseline
from reports import findings, releases, writing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m reports", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ended = commands.add_parser("exit-code", help="return the exit code that a run ended with")
    ended.add_argument("record", type=Path)
    render = commands.add_parser("render", help="write the report of a record, or of a journal")
    render.add_argument("record", type=Path, help="a record's folder, or what a killed run left")
    render.add_argument("--to", type=Path, metavar="DIR", help="(default: into the record)")
    compare = commands.add_parser("compare", help="judge one record against another")
    compare.add_argument("baseline", type=Path)
    compare.add_argument("record", type=Path)
    compare.add_argument("--report", type=Path, metavar="DIR", help="write a report into DIR too")
    upgrade = commands.add_parser(
        "upgrade", help="record the environment of another interpreter, gate this one against it"
    )
    upgrade.add_argument("old_python", help="interpreter of the old environment")
    upgrade.add_argument("-n", default="auto", dest="workers", help="processes")
    table = commands.add_parser("releases", help="print a table of releases and nodes")
    table.add_argument(
        "records", type=Path, nargs="+", help="of a release several: the last counts"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "exit-code":
            return exit_code(chosen.record)
        if chosen.command == "compare":
            baseline = record.read(chosen.baseline)
            require_baseline(baseline, str(chosen.baseline))
            observed = record.read(chosen.record)
            code = compare_records(baseline, observed)
            if chosen.report:
                title = f"{chosen.record.name} against {chosen.baseline.name}"
                write_report(
                    findings.compare(
                        baseline, observed, title=title, baseline=str(chosen.baseline)
                    ),
                    chosen.report,
                )
            return code
        if chosen.command == "releases":
            print("\n".join(releases.lines(map(record.read, chosen.records))))
            return 0
        if chosen.command == "render":
            return render_record(chosen.record, chosen.to)
        return gate_upgrade(chosen.old_python, chosen.workers)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return verdict.EXIT_USAGE


def exit_code(folder: Path) -> int:
    """The code that the run of a record ended with; never 0 for one that was cut short."""
    found = record.read(folder)
    if "exit_code" not in found.verdict:
        raise RecordError(f"{folder} holds no verdict: it is a golden observation, not a run")
    code = int(found.verdict["exit_code"])
    return code if found.complete else code or verdict.EXIT_INTERRUPTED


def render_record(source: Path, target: Path | None) -> int:
    """Writes the report of a record; a journal becomes a record first."""
    if source.is_file():
        source = record_of_journal(source)
    found = findings.find(
        record.read(source), title=source.resolve().name, score=writing.score_beside(source)
    )
    write_report(found, target or source)
    return 0


def record_of_journal(path: Path) -> Path:
    """Makes the record of a killed run from its journal, marked incomplete."""
    left = journal.read(path)
    judgements = verdict.judge_record(left, None)
    folder = path.with_name(path.name.removesuffix(journal.SUFFIX))
    conclusion = {
        "exit_code": verdict.EXIT_INTERRUPTED,
        "meaning": verdict.EXIT_MEANING[verdict.EXIT_INTERRUPTED],
        "baseline": "none",
        "cases": {j.case.id: verdict.to_plain(j, measured=True) for j in judgements},
    }
    try:
        record.write(replace(left, verdict=conclusion), folder)
    except OSError as error:
        raise RecordError(f"{folder} cannot be written ({error})") from error
    print(f"record: {folder}, marked incomplete")
    return folder


def write_report(found: findings.Findings, folder: Path) -> None:
    """Writes all files of a report, and says where."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for problem in writing.write(found, folder):
            print(problem, file=sys.stderr)
    except OSError as error:
        raise RecordError(f"the report cannot be written to {folder} ({error})") from error
    print(f"report: {folder / 'report.html'}")


def compare_records(baseline: Record, observed: Record) -> int:
    """Prints what moved between two records; the exit code of the verdicts."""
    judgements = verdict.judge_record(observed, baseline)
    for line in summary.tables(judgements):
        print(line)
    for line in summary.environment_changes(baseline.environment, observed.environment):
        print(line)
    for line in summary.failures(judgements):
        print(line)
    moved = [j for j in judgements if j.verdict is verdict.Verdict.DRIFT]
    same = sum(1 for j in judgements if j.verdict is verdict.Verdict.PASS)
    print(f"\n{len(moved)} cases moved inside their bounds, {same} did not move{':' * bool(moved)}")
    for line in summary.drift_table(judgements) if moved else []:
        print(f"  {line}")
    code = verdict.exit_code(judgements)
    if not observed.complete:
        code = code or verdict.EXIT_INTERRUPTED
    meaning = verdict.EXIT_MEANING[code]
    if old := verdict.outlived_among(judgements):
        meaning += f"; {old}"
    print(f"\nverdict: {meaning} (exit code {code})")
    return code


def gate_upgrade(old_python: str, workers: str) -> int:
    """Records with the old interpreter, gates this one against it, prints the table of changes."""
    folder = Path("reports") / "runs" / f"upgrade-{time.strftime('%Y%m%d-%H%M%S')}"
    old, new = folder / "old", folder / "new"
    versions = [_torch_of(python) for python in (old_python, sys.executable)]
    print(f"== torch {' -> '.join(versions)}", flush=True)
    if note := two_builds(*versions):
        print(note, flush=True)
    print("\n== the old environment: recorded\n", flush=True)
    _gate(old_python, workers, old, "none")
    if not old.exists():
        print(f"error: the old environment left no record in {old}; its run is shown above")
        return verdict.EXIT_USAGE
    print("\n== the new environment: gated against the old one\n", flush=True)
    code = _gate(sys.executable, workers, new, str(old))
    if new.exists():
        print("\n== what the upgrade moved\n", flush=True)
        before, now = record.read(old), record.read(new)
        compare_records(before, now)
        title = f"upgrade to {sys.executable}"
        write_report(findings.compare(before, now, title=title, baseline=str(old)), folder)
    return code


def _torch_of(python: str) -> str:
    """The version of an interpreter's torch, its build included, as torch itself says it."""
    ask = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        if not version:
            raise OSError("it says nothing of a version")
        return version
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "").strip().splitlines() or [str(error)]
        raise RecordError(
            f"{python} cannot load torch ({said[-1]}); name the interpreter of an environment "
            "that has torch and the suite"
        ) from error


def _gate(python: str, workers: str, folder: Path, baseline: str) -> int:
    options = [f"--record={folder}", f"--baseline={baseline}", f"-n{workers}", "-q"]
    return gate.run(python, options)


if __name__ == "__main__":
    sys.exit(main())
