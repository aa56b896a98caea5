"""What ``make gate`` starts: pytest as a child, whose 0 counts only with a complete record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures import gate
from meta_tests.running import ROOT, Repository, copy_repository, environment, read_json
from meta_tests.test_runs_accidents import wait_for
from reports.__main__ import _gate

CHECKS = """
    import pathlib, time

    class TestOp:
        def test_sound(self, check, device):
            check.exact(1, 1)

        def test_red(self, check, device):
            check.exact(1, 2)

        def test_leaves(self, check, device):
            os._exit(0)

        def test_waits(self, check, device):
            pathlib.Path("waiting").touch()
            time.sleep(60)
"""
PROVES_NOTHING = "error: pytest ended with 0, but it left no record: nothing is proved"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = copy_repository(tmp_path)
    repository.write_checks(CHECKS)
    return repository


def test_the_code_of_a_run_that_its_record_bears_out_is_passed_on(repository: Repository) -> None:
    sound = repository.run("-k", "sound", module="fixtures.gate")
    assert sound.code == 0, sound.text
    assert "verdict: every verified case holds (exit code 0)" in sound.text
    red = repository.run("-k", "sound or red", "--record", "red", module="fixtures.gate")
    assert red.code == 1, red.text
    assert read_json(repository.root / "red" / "cases.json")["complete"] is True
    refused = repository.run("-k", "sound", "--record=red", module="fixtures.gate")
    assert refused.code == 4
    assert "--record red exists" in refused.text


def test_a_check_that_ends_the_process_with_0_does_not_end_the_gate_with_0(
    repository: Repository,
) -> None:
    selected = ("-n0", "-k", "sound or leaves")
    assert repository.run(*selected).code == 0  # all that pytest itself can say
    for more in ((), ("--record", "record")):
        ended = repository.run(*selected, *more, module="fixtures.gate")
        assert (ended.code, PROVES_NOTHING in ended.text) == (3, True), ended.text


def test_a_module_that_ends_the_process_when_it_is_imported_does_not_either(
    repository: Repository,
) -> None:
    (repository.root / "mine.py").write_text("import os\n\nos._exit(0)\n")
    for named in ("--model=mine:build", "--implementation=gelu=mine:gelu"):
        ended = repository.run("-k", "sound", named, module="fixtures.gate")
        assert (ended.code, PROVES_NOTHING in ended.text) == (3, True), ended.text


def test_a_record_of_an_earlier_run_proves_nothing(repository: Repository) -> None:
    earlier = repository.record("-k", "sound", to="earlier")
    # Before pytest can refuse the folder.
    (repository.root / "conftest.py").write_text("import os\n\nos._exit(0)\n")
    ended = repository.run("--record", earlier, module="fixtures.gate")
    assert ended.code == 3
    assert f"{earlier} is of an earlier run: nothing is proved" in ended.text


def test_a_record_of_an_earlier_process_of_the_same_number_proves_nothing(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container every run may have the number that the last one had."""

    class Ending:
        pid = 4711

        def __init__(self, command: list[str]) -> None:
            if command[-1] == "measures":
                repository.record("-k", "sound", to="reports/runs/20260102-000000-4711")

        def wait(self) -> int:
            return 0

    repository.record("-k", "sound", to="reports/runs/20260101-000000-4711")
    monkeypatch.setattr(gate, "RUNS", repository.root / "reports" / "runs")
    monkeypatch.setattr(subprocess, "Popen", Ending)
    assert gate.run("python", ["leaves"]) == 3
    assert gate.run("python", ["measures"]) == 0


def test_a_record_that_the_environment_names_is_found(repository: Repository) -> None:
    named = "-n0 --record=record"
    ended = repository.run("-k", "sound", module="fixtures.gate", PYTEST_ADDOPTS=named)
    assert ended.code == 0, ended.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_reach_the_run(repository: Repository, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fixtures.gate", "-n0", "-k", "sound or waits"],
        cwd=repository.root,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(repository.root / "waiting")
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)  # as CI does
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, text
    [record] = (repository.root / "reports" / "runs").glob("2*")
    assert read_json(record / "cases.json")["complete"] is False


def test_a_run_that_a_signal_ended_has_the_code_of_a_shell(tmp_path: Path) -> None:
    assert gate.run(_script(tmp_path, "kill -9 $$"), []) == 128 + 9


def test_an_upgrade_whose_pytest_leaves_no_record_does_not_end_with_0(tmp_path: Path) -> None:
    python = _script(tmp_path, "exit 0")
    assert _gate(python, "0", tmp_path / "record", "none") == 3


def _script(folder: Path, line: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_of_a_checkout_that_cannot_be_written_to_the_record_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gate.os, "access", lambda path, mode: False)
    monkeypatch.setattr(gate.tempfile, "gettempdir", lambda: str(tmp_path))
    [option] = gate._elsewhere(["-n0"])
    assert option.startswith(f"--record={tmp_path}/precision-")
    assert gate._elsewhere(["--record", "mine"]) == gate._elsewhere(["--record=mine"]) == []


@pytest.mark.parametrize("target", ["gate", "claims"])
def test_make_starts_it_with_the_options_given(target: str) -> None:
    command = ["make", "-n", target, "USE=/bin/true", "WORKERS=2", "OPTIONS=-k sound"]
    text = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    marks = {"gate": "", "claims": "-m claims "}[target]
    assert f"/bin/true -m fixtures.gate {marks}-n 2 -k sound" in text.stdout, text
