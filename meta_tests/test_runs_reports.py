"""Reports of whole runs, also of those that are interrupted or killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meta_tests.running import Repository, copy_repository, read_json
from meta_tests.test_runs_accidents import WAITING, running_in, wait_for
from reports.writing import WRITERS

ALL = {"cases.json", "tensors.safetensors", "run.json", "verdict.json", *WRITERS}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_leaves_a_report_beside_its_record(tmp_path: Path, workers: int) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    ended = repository.run("-k", "unscale", "--report=all", "-n", workers)
    assert ended.code == 0, ended.text
    [folder] = [path for path in runs_of(repository) if not path.is_symlink()]
    assert {path.name for path in folder.iterdir()} == ALL
    assert f"report: {folder / 'report.html'}" in ended.text
    assert "cases hold on torch" in (folder / "report.html").read_text()


def runs_of(repository: Repository) -> list[Path]:
    runs = repository.root / "reports" / "runs"
    return list(runs.iterdir()) if runs.exists() else []


def test_a_report_that_fails_is_said_and_changes_no_verdict(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    (repository.root / "reports" / "templates" / "report.html").unlink()
    ended = repository.run("-k", "unscale", "--report=all", "--record=record")
    assert ended.code == 0, ended.text
    assert "no report (TemplateNotFound: " in ended.text
    assert "see python -m reports render record" in ended.text
    assert read_json(repository.root / "record" / "verdict.json")["exit_code"] == 0


def test_sigterm_ends_a_run_with_its_record_and_report(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(WAITING)
    text, code = ended_by(signal.SIGTERM, repository)
    assert code == 2, text
    record = repository.root / "record"
    assert {path.name for path in record.iterdir()} == ALL
    assert read_json(record / "cases.json")["complete"] is False
    assert "INCOMPLETE: the run was interrupted" in (record / "report.html").read_text()
    wait_until(lambda: running_in(repository) == [])
    assert not (repository.root / "record.journal").exists()


def test_what_a_killed_run_measured_becomes_an_incomplete_record(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(WAITING)
    _, code = ended_by(signal.SIGKILL, repository)
    assert code == -signal.SIGKILL
    journal, record = (repository.root / name for name in ("record.journal", "record"))
    assert not record.exists()
    with journal.open("a") as file:
        file.write('{"node": "gelu", "prom')  # as a line is cut off
    rendered = repository.run("render", journal, module="reports")
    assert rendered.code == 0, rendered.text
    assert {path.name for path in record.iterdir()} == ALL
    content = read_json(record / "cases.json")
    assert (content["complete"], len(content["cases"])) == (False, 1)
    assert "Interrupted after 1 case" in (record / "summary.md").read_text()
    assert repository.run("exit-code", record, module="reports").code == 2
    baseline = repository.run("--baseline=record")
    assert "is the record of an interrupted run" in baseline.text


def test_the_next_run_tells_of_one_that_was_killed(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    runs = repository.root / "reports" / "runs"
    runs.mkdir(parents=True)
    for name in (f"20260101-000000-{os.getpid()}", "20260101-000000-99999999"):
        (runs / f"{name}.journal").touch()
    told = re.findall(r"python -m reports render (\S+)", repository.run("-k", "unscale").text)
    assert [Path(path).name for path in told] == ["20260101-000000-99999999.journal"]


def ended_by(number: signal.Signals, repository: Repository) -> tuple[str, int]:
    process = repository.start("--record=record", "--report=all")
    try:
        wait_for(repository.root / "waiting")
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return text, process.returncode


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("spoilt", ["missing", "no-json", "schema", "record"])
def test_what_is_no_journal_is_refused_by_name(tmp_path: Path, spoilt: str) -> None:
    repository = copy_repository(tmp_path)
    journal = repository.root / "some.journal"
    contents = {
        "no-json": "nonsense\n",
        "schema": '{"schema": 99, "environment": {}, "injected": "", "run": {}}\n',
        "record": '{"cases": []}\n',
    }
    if spoilt in contents:
        journal.write_text(contents[spoilt])
    rendered = repository.run("render", journal, module="reports")
    assert rendered.code == 4
    assert re.search(r"^error: .*some\.journal.*", rendered.text)
    assert "Traceback" not in rendered.text


def test_two_records_are_compared_in_a_report(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    old = repository.record("-k", "unscale", to="old")
    new = repository.record("-k", "unscale", to="new")
    ended = repository.run("compare", old, new, "--report", "pair", module="reports")
    assert ended.code == 0, ended.text
    assert {path.name for path in (repository.root / "pair").iterdir()} == set(WRITERS)
    assert "new against old" in (repository.root / "pair" / "report.html").read_text()
