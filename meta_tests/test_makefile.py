"""Environments that make builds: what a failed installation says and leaves; an own interpreter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from meta_tests.running import ROOT, environment

TIMEOUT_S = 60
# Makes folders as venv does; the interpreter in one runs what the test says for pip.
STAND_IN = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin"
cp "$0.pip" "$3/bin/python"
"""


def make(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["make", "--no-print-directory", *words, f"VENVS={folder / 'venvs'}"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, text


@pytest.fixture
def installing(tmp_path: Path) -> list[str]:
    """The words for make to install, which fails, into ``venvs/torch-9.9`` of the test's folder."""
    python, pip = tmp_path / "python", tmp_path / "python.pip"
    python.write_text(STAND_IN)
    pip.write_text("#!/bin/sh\necho The conflict is caused by: sympy\nexit 1")
    for path in (python, pip):
        path.chmod(0o755)
    return [f"{tmp_path / 'venvs/torch-9.9/ready'}", "TORCH=torch==9.9", f"PYTHON={python}"]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return tmp_path / "venvs" / "torch-9.9"


def test_a_failed_installation_shows_the_words_of_pip_and_leaves_nothing(
    tmp_path: Path, installing: list[str], made: Path
) -> None:
    code, text = ended(make(tmp_path, *installing))
    assert code == 2
    assert "installing torch==9.9" in text
    assert "The conflict is caused by: sympy" in text
    assert not made.exists()


def test_an_environment_that_was_ready_outlives_a_failed_update(
    tmp_path: Path, installing: list[str], made: Path
) -> None:
    made.mkdir(parents=True)
    (made / "ready").touch()
    os.utime(made / "ready", (0, 0))
    assert ended(make(tmp_path, *installing))[0] == 2
    assert (made / "ready").stat().st_mtime == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_installation_leaves_nothing(
    tmp_path: Path, installing: list[str], made: Path, sent: signal.Signals
) -> None:
    (tmp_path / "python.pip").write_text("#!/bin/sh\nexec sleep 30")
    process = make(tmp_path, *installing)
    started = time.monotonic()
    while not made.exists() and time.monotonic() < started + TIMEOUT_S:
        time.sleep(0.02)
    os.killpg(process.pid, sent)
    assert ended(process)[0] != 0
    assert not made.exists()


@pytest.mark.parametrize(
    ("interpreter", "words"),
    [
        ("no/such/python", "USE=no/such/python cannot be run"),
        ("bare", "lacks torch, pytest, .* -m pip install -e . adds the rest"),
        ("/bin/true", "USE=/bin/true cannot check a torch: name an interpreter of Python 3.11"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_named_with_the_remedy(
    tmp_path: Path, interpreter: str, words: str
) -> None:
    if interpreter == "bare":
        interpreter = str(tmp_path / "bare")
        Path(interpreter).write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"')
        Path(interpreter).chmod(0o755)
    code, text = ended(make(tmp_path, "gate", f"USE={interpreter}"))
    assert code == 2
    assert re.search(f"(?m)^error: .*{words}", text)
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("gate TORCH=2.6.0", "TORCH=2.6.0 names no release of torch; name one as TORCH=torch=="),
        ("gate TORCH=torch>=2.5", "TORCH=torch>=2.5 names no release of torch"),
        ("gate TORCH=", "TORCH= names no release of torch"),
        ("upgrade FROM=torch==2.13.0 TO=2.14.1", "TO=2.14.1 names no release of torch"),
        ("upgrade FROM=2.13.0 TO=torch==2.14.1", "FROM=2.13.0 names no release of torch"),
        ("upgrade FROM=torch==2.13.0", "usage: make upgrade FROM=torch==A TO=torch==B"),
        ("gate PYTHON=no/such/python", "PYTHON=no/such/python is no Python 3.11 or later"),
        ("gate PYTHON=/bin/false", "PYTHON=/bin/false is no Python 3.11 or later"),
    ],
)
def test_a_wrong_word_is_named_before_anything_is_made(
    tmp_path: Path, words: str, text: str
) -> None:
    code, said = ended(make(tmp_path, *words.split()))
    assert code == 2
    assert text in said
    assert list(tmp_path.iterdir()) == []


def test_what_torch_requires_is_not_pinned() -> None:
    """Releases differ in it: 2.6 wants sympy 1.13.1 and no other, 2.13 a later one."""
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    required = [Requirement(text) for text in metadata.requires("torch") or ()]
    chosen = {canonicalize_name(r.name) for r in required if "extra" not in str(r.marker)}
    assert chosen
    assert not pinned & chosen
