"""What is wrong on a command line: named with its remedy, exit code 4, and nothing is begun."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.first_minutes import __main__ as first_minutes
from fixtures.options import may_select
from meta_tests.running import ROOT, copy_repository, environment

PROGRAMS: dict[str, tuple[str, str]] = {
    "fixtures.faults.__main__": ("--workers 0", "--workers: 0: give a number from 1 up"),
    "fixtures.prediction.__main__": ("A100 H100 --steps -1", "--steps: -1: give a number from"),
    "fixtures.bench": ("--only gone", "invalid choice: 'gone'"),
    "fixtures.audit.twins": ("--steps many", "--steps: many: give a number from 1 up"),
    "fixtures.claims.__main__": ("nowhere", "nowhere is not a record"),
    "fixtures.first_minutes.__main__": ("--pretend h1000", "--pretend: no chip 'h1000'; chips"),
    "fixtures.first_minutes.accuracy": ("--chunks 0", "--chunks: 0: give a number from 1 up"),
    "fixtures.first_minutes.kernels": ("--device gpu", "--device: gpu is none of: cuda, cuda:1"),
    "reports.__main__": ("compare alone", "the following arguments are required: record"),
}
"""By module: a wrong command line, and what is said of it."""


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_wrong_option_ends_a_program_with_4(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, text = PROGRAMS[module]
    monkeypatch.setattr(sys, "argv", [module, *words.split()])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert ended.value.code == 4
    assert text in capsys.readouterr().err


def test_every_program_is_among_them() -> None:
    """But for the gate, whose options are those of pytest, which refuses them itself."""
    sources = [path for name in ("fixtures", "reports") for path in (ROOT / name).rglob("*.py")]
    makes = re.compile(r"\bParser\(|ArgumentParser\(")
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources
        if makes.search(path.read_text())
    }
    assert found == {*PROGRAMS, "fixtures.command_line", "fixtures.gate"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--workers 0", "--workers: 0: give a number from 1 up"),
        ("--minutes nan", "--minutes: nan: give a number above 0"),
        ("--minutes soon", "--minutes: soon: give a number above 0"),
        ("--pretend h100,gone", "--pretend: no chip 'gone'"),
        ("--pretend h100 README.md", "README.md exists; name another folder, or remove it first"),
        ("--pretend h100 README.md/x", "cannot be made (Not a directory); name a folder that can"),
        ("--pretend h100 --only 5", "--only 5: there is no such step; there are: 1-machine"),
    ],
)
def test_the_first_minutes_refuse_before_they_begin(
    words: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = {"torch": "2.13.0", "cuda": None, "gpus": [], "gib": [], "marks": []}
    monkeypatch.setattr(first_minutes, "look", lambda environ: seen)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        first_minutes.main(words.split())
    assert ended.value.code == 4
    assert text in capsys.readouterr().err


def test_a_rehearsal_takes_the_mark_of_its_first_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"torch": "2.13.0", "cuda": None, "gpus": [], "gib": [], "marks": []}
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(first_minutes, "look", lambda environ: seen)
    monkeypatch.setattr(
        first_minutes, "run_all", lambda page, _: commands.extend(s.command for s in page.steps)
    )
    first_minutes.main(["--pretend", "H100,h100", str(tmp_path / "new"), "--only", "2-collected"])
    assert [command[-1] for command in commands] == ["h100"]
    assert "--pretend=H100,h100" in commands[0]


def test_a_torch_that_cannot_be_loaded_is_told_in_a_line() -> None:
    said = first_minutes.look(os.environ, "raise ImportError('libcudart.so.13: no such file')")
    assert isinstance(said, str)
    assert "cannot use torch (ImportError: libcudart.so.13: no such file)" in said
    assert "Traceback" not in said


WITHOUT_TORCH = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        torch = name.partition(".")[0] == "torch"
        return None if torch else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_an_environment_without_torch_is_told_so_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    root = copy_repository(tmp_path, "gelu").root
    ended = subprocess.run(
        [sys.executable, "-m", "fixtures.gate", "-m", "gelu"],
        cwd=root,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    text = ended.stdout + ended.stderr
    assert ended.returncode == 4, text
    assert re.search(r"^ERROR: .* has no torch; make gate makes an environment", text, re.M), text
    assert "Error" not in text


@pytest.mark.parametrize(
    ("markexpr", "asked"),
    [
        ("model", True),
        ("gelu or model", True),
        ("model and compiled and not ranks", True),
        ("not model", False),
        ("gelu and not model", False),
        ("model and not model", False),
        ("models", False),
        ("(model", False),
    ],
)
def test_what_may_select_for_a_mark_is_told_from_what_may_not(markexpr: str, asked: bool) -> None:
    assert may_select("model", markexpr) is asked
