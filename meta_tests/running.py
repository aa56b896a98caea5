"""Real runs of pytest on a copy of the repository, for tests of what the suite does end to end.

A fresh process spends some 4 s on imports. These runs are forks of one process that has torch and
its like loaded, and nothing of the suite: each costs less than a second. Workers of xdist, reruns
and rehearsals are fresh processes all the same; so is what ``Repository.start`` starts.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120

_PRELOADED = (
    "hypothesis.strategies",
    "mpmath",
    "packaging.specifiers",
    "pytest",
    "safetensors.numpy",
    "scipy.special",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
_PATTERNS = shutil.ignore_patterns("__pycache__", "runs", "observed", ".staging", "log.jsonl")
_OWN = ("PYTEST_", "PRECISION_", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, and what it printed."""

    code: int
    text: str


@dataclass(frozen=True)
class Repository:
    """A copy of the repository with few nodes, which a test may spoil.

    ``golden/observed`` is not copied: a run has a baseline only where it names one.
    """

    root: Path

    def run(
        self, *arguments: object, module: str = "pytest", file_limit: int = 0, **environ: str
    ) -> Ended:
        """``python -m pytest *arguments`` in the copy's folder.

        ``file_limit``: bytes that a file may grow to, as if the disk were full then.
        """
        with tempfile.NamedTemporaryFile("rb") as output:
            request = {
                "root": str(self.root),
                "output": output.name,
                "module": module,
                "arguments": _arguments(module, arguments),
                "environ": environment() | environ,
                "file_limit": file_limit,
            }
            code = _server().ask(request)
            return Ended(code, output.read().decode())

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """The same in a fresh process and session, to be sent signals while it runs."""
        command = [sys.executable, "-m", "pytest", *_arguments("pytest", arguments)]
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def record(self, *arguments: object, to: str) -> Path:
        """The record of a run that has to end with 0."""
        folder = self.root / to
        ended = self.run(*arguments, f"--record={folder}")
        assert ended.code == 0, ended.text
        return folder

    def edit(self, file: str, old: str, new: str) -> None:
        """Replaces what stands exactly once in a file."""
        path = self.root / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
        path.write_text(text.replace(old, new))

    def write_checks(self, source: str) -> None:
        """Adds checks of a node that the copy does not have: ``weight_update``."""
        head = "import os, signal\nimport pytest, torch\nimport torch.distributed as dist\n\n"
        path = self.root / "precision_tests" / "test_weight_update.py"
        path.write_text(head + textwrap.dedent(source))

    def files(self) -> set[str]:
        """What lies in the copy, bytecode aside: to see that a run left nothing behind."""
        paths = (path.relative_to(self.root) for path in self.root.rglob("*"))
        return {str(path) for path in paths if "__pycache__" not in path.parts}


def copy_repository(folder: Path, *nodes: str) -> Repository:
    """A copy below ``folder`` that has the checks of ``nodes``, and all golden truth."""
    root = folder / "repository"
    for name in ("fixtures", "golden", "reports"):
        shutil.copytree(ROOT / name, root / name, ignore=_PATTERNS)
    (root / "precision_tests").mkdir()
    checks = [f"precision_tests/{name}.py" for name in ("__init__", *(f"test_{n}" for n in nodes))]
    for file in ("conftest.py", "pyproject.toml", ".gitignore", *checks):
        shutil.copy(ROOT / file, root / file)
    return Repository(root)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(read_json(path) | values))


def _arguments(module: str, arguments: tuple[object, ...]) -> list[str]:
    if module != "pytest":
        return [*map(str, arguments)]
    own = ["-p", "no:cacheprovider", "-W", "ignore:Module already imported", "--report=none"]
    return [*own, *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's own, without a GPU, and without what a run of pytest or torchrun left."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    return own | {"CUDA_VISIBLE_DEVICES": ""}


# --- the process that runs are forked from ------------------------------------------------------


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> int:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        print(json.dumps(request), file=requests, flush=True)
        return int(replies.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve(requests: IO[str]) -> None:
    """Forks for each request and replies with the exit code; returns only in a fork."""
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # or every fork copies, and at its end collects, all that was imported
    for line in requests:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    signal.alarm(TIMEOUT_S)
    output = os.open(request["output"], os.O_WRONLY)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
    if request["file_limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    os.chdir(request["root"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[0] = request["root"]
    sys.path[1:1] = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(sys.stdin)
