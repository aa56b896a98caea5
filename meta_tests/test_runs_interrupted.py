"""Runs that were cut short, at any moment and twice: no record of one says that it is complete."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.journal import SUFFIX
from meta_tests.running import Ended, Repository, copy_repository, read_json

LONG = """
    import pathlib, time

    ran = []

    class TestOp:
        @pytest.mark.parametrize("number", range(400))
        def test_it(self, check, device, number):
            ran.append(number)
            if len(ran) > 8:  # some have reported then
                pathlib.Path(f"begun-{os.getpid()}").touch()
            time.sleep(0.05)
            check.exact(number, number)
"""


def interrupt(repository: Repository, cut: Callable[[int], None], *options: object) -> Ended:
    """Starts a run and cuts it, given its process, when its first check has begun."""
    process = repository.start(*options)
    try:
        deadline = time.monotonic() + 60
        while not list(repository.root.glob("begun-*")):
            assert time.monotonic() < deadline, "no check began"
            time.sleep(0.02)
        cut(process.pid)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return Ended(process.returncode, text)


def require_unfinished(repository: Repository, ended: Ended) -> list[Path]:
    """Nothing that the run left says that everything was measured. The records that it left."""
    assert ended.code != 0, ended.text
    assert "every verified case holds" not in ended.text
    runs = repository.root / "reports" / "runs"
    left = [p for p in runs.iterdir() if not p.is_symlink()] if runs.exists() else []
    records = [path for path in left if path.is_dir()]
    for record in records:
        require_no_result(repository, record)
    for journal in (path for path in left if path.name.endswith(SUFFIX)):
        rendered = repository.run("render", journal, module="reports")
        assert rendered.code == 0, rendered.text
        require_no_result(repository, journal.with_name(journal.name.removesuffix(SUFFIX)))
    return records


def require_no_result(repository: Repository, record: Path) -> None:
    complete = repository.root / "complete"
    if not complete.exists():
        repository.record("-k", "test_it and 399", to="complete")
    assert read_json(record / "cases.json")["complete"] is False
    concluded = read_json(record / "verdict.json")
    assert (concluded["exit_code"], concluded["meaning"]) == (
        2,
        "interrupted: not everything was measured",
    )
    assert repository.run("exit-code", record, module="reports").code == 2
    compared = repository.run("compare", complete, record, module="reports")
    assert compared.code == 2, compared.text
    assert "verdict: interrupted: not everything was measured (exit code 2)" in compared.text
    refused = repository.run(f"--baseline={record}", "--collect-only")
    assert refused.code == 4
    assert "is the record of an interrupted run: it cannot be a baseline" in refused.text


@pytest.mark.parametrize(("workers", "delay"), [(2, 0.05), (2, 0.12), (2, 0.3), (0, 0.02)])
def test_ctrl_c_twice_leaves_no_complete_record(tmp_path: Path, workers: int, delay: float) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(LONG)

    def cut(process: int) -> None:
        os.killpg(process, signal.SIGINT)
        time.sleep(delay)
        os.killpg(process, signal.SIGINT)

    require_unfinished(repository, interrupt(repository, cut, "-n", workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_ctrl_c_while_pytest_speaks_of_the_first_does_not_complete_a_record(
    tmp_path: Path, workers: int
) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(LONG)
    # pytest has not noted the first one then, and ends the session with the status 0.
    second = "\n\ndef pytest_keyboard_interrupt():\n    raise KeyboardInterrupt\n"
    conftest = repository.root / "conftest.py"
    conftest.write_text(conftest.read_text() + second)
    ended = interrupt(repository, lambda process: os.killpg(process, signal.SIGINT), "-n", workers)
    [record] = require_unfinished(repository, ended)
    facts = read_json(record / "run.json")
    assert facts["reported"] < facts["collected"] == 400


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path, times: int) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(LONG)

    def cut(process: int) -> None:
        for _ in range(times):
            os.kill(process, signal.SIGTERM)
            time.sleep(0.05)

    records = require_unfinished(repository, interrupt(repository, cut, "-n0"))
    assert len(records) == 1 or times == 2


def test_a_run_that_is_killed_leaves_a_journal_alone(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(LONG)
    ended = interrupt(repository, lambda process: os.kill(process, signal.SIGKILL), "-n0")
    assert require_unfinished(repository, ended) == []
    assert list((repository.root / "reports" / "runs").glob(f"*{SUFFIX}"))


def test_a_run_that_ends_at_its_first_failure_is_not_complete(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            @pytest.mark.parametrize("number", range(3))
            def test_it(self, check, device, number):
                check.exact(number, 0)
        """
    )
    ended = repository.run("-x", "--record", "record")
    assert ended.code == 1
    assert "1 failed, 1 passed" in ended.text
    assert read_json(repository.root / "record" / "cases.json")["complete"] is False
    assert repository.run("exit-code", "record", module="reports").code == 1


def test_a_run_that_ends_at_what_could_not_be_measured_has_no_code_of_a_regression(
    tmp_path: Path,
) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            @pytest.mark.parametrize("number", range(3))
            def test_it(self, check, device, number):
                check.exact(number, number)
                raise OSError("no file")
        """
    )
    ended = repository.run("-x", "--record", "record")
    assert ended.code == 3
    assert "REGRESSION" not in ended.text
    assert repository.run("exit-code", "record", module="reports").code == 3


def test_a_worker_that_is_killed_is_said_and_the_rest_is_measured(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            @pytest.mark.parametrize("number", range(6))
            def test_it(self, check, device, number):
                if number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                check.exact(number, number)
        """
    )
    ended = repository.run("-n", "2", "--record", "record")
    assert ended.code == 3
    facts = read_json(repository.root / "record" / "run.json")
    assert facts["reported"] == facts["collected"] == 6
    assert read_json(repository.root / "record" / "cases.json")["complete"] is True
    assert repository.run("exit-code", "record", module="reports").code == ended.code


def test_a_run_that_nobody_cuts_is_complete(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(LONG.replace("400", "4"))
    for workers in (0, 2):
        record = repository.record("-n", workers, to=f"record-{workers}")
        facts = read_json(record / "run.json")
        assert facts["reported"] == facts["collected"] == 4
        assert read_json(record / "cases.json")["complete"] is True
        assert repository.run("exit-code", record, module="reports").code == 0
