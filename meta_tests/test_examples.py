"""The examples for CI, Slurm and Kubernetes run, with stand-ins for what is not here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meta_tests.running import ROOT, Repository, copy_repository, environment

EXAMPLES = ROOT / "docs" / "examples"
FEW = "-m 'gelu and bound' -k forward -p no:cacheprovider"
FEW_ON_RANKS = "-k 'w2 and bf16' -p no:cacheprovider"
ENDED_WITHIN_S = 240.0

# Makes "environments" that are this one; the new release has the fault that NEW_HAS names.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") echo "$@" >> "$PIP_LOG" ;;
*)
    case "$0" in
    */new/bin/python) PRECISION_INJECT=$NEW_HAS; export PRECISION_INJECT ;;
    *) unset PRECISION_INJECT ;;
    esac
    PRECISION_REAL "$@" ;;
esac
"""
SCONTROL = '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "localhost\\nlocalhost\\n"\n'
SRUN = """#!/bin/sh
SLURM_NODEID=1 "$@" > other.txt 2>&1 &
SLURM_NODEID=0 "$@"
code=$?
wait
exit $code
"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """With GELU's checks and the examples."""
    found = copy_repository(tmp_path, "gelu")
    shutil.copytree(EXAMPLES, found.root / "docs" / "examples")
    shutil.copy(ROOT / "constraints.txt", found.root)
    return found


def command(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def free_port() -> str:
    with socket.create_server(("localhost", 0)) as server:
        return str(server.getsockname()[1])


def shell(root: Path, script: str, **environ: str) -> subprocess.Popen[str]:
    own = {**environment(), "PYTEST_ADDOPTS": FEW, "MASTER_PORT": free_port(), **environ}
    path = [str(root / "stand-ins"), str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=root,
        env=own | {"PATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        return process.wait(ENDED_WITHIN_S), process.communicate()[0]
    finally:
        process.kill()


def steps() -> list[str]:
    workflow: dict[str, Any] = yaml.safe_load((EXAMPLES / "github_actions.yml").read_text())
    return [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step]


# --- CI -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "expected"), [("", 0), ("gelu_tanh_for_erf", 1)])
def test_the_workflow_gates_an_upgrade(repository: Repository, fault: str, expected: int) -> None:
    """Its ``run:`` steps, one after the other; the first has the verdict's exit code."""
    gate, summary = steps()
    assert gate.startswith("docs/examples/gate_upgrade.sh ")
    stand_in = PYTHON.replace("PRECISION_REAL", sys.executable)
    log, page = repository.root / "pip.txt", repository.root / "page.md"
    environ = {
        "PYTHON": str(command(repository.root / "stand-ins", "python-of-ci", stand_in)),
        "PIP_LOG": str(log),
        "NEW_HAS": fault,
        "OLD": "torch==2.13.0",
        "NEW": "torch==2.14.1",
        "GITHUB_STEP_SUMMARY": str(page),
    }
    code, text = ended(shell(repository.root, gate, **environ))
    assert code == expected, text
    assert [line.split()[-3] for line in log.read_text().splitlines()] == [
        environ["OLD"],
        environ["NEW"],
    ]
    assert ended(shell(repository.root, summary, **environ))[0] == 0
    assert f"Exit code **{expected}**" in page.read_text()


@pytest.mark.parametrize("given", ["torch==2.13.0", "2.13.0 torch==2.14.1"])
def test_the_shell_example_names_what_it_needs(repository: Repository, given: str) -> None:
    code, text = ended(shell(repository.root, f"docs/examples/gate_upgrade.sh {given}"))
    assert (code, text.startswith("usage: ")) == (4, True)


# --- launchers ----------------------------------------------------------------------------------


def test_the_slurm_example_runs_two_agents_and_ends_with_their_verdict(
    repository: Repository,
) -> None:
    command(repository.root / "stand-ins", "scontrol", SCONTROL)
    command(repository.root / "stand-ins", "srun", SRUN)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "RANKS": "1",
        "PYTEST_ADDOPTS": FEW_ON_RANKS,
    }
    code, text = ended(shell(repository.root, "bash docs/examples/gate.sbatch", **slurm))
    assert code == 0, text + (repository.root / "other.txt").read_text()
    assert "1 passed" in text
    # torchrun ends with 1 then.
    asked = f"{FEW_ON_RANKS.replace('w2', 'w4')} --require ranks"
    absent = {**slurm, "SLURM_JOB_ID": "8", "PYTEST_ADDOPTS": asked}
    code, text = ended(shell(repository.root, "bash docs/examples/gate.sbatch", **absent))
    assert (code, "4 ranks are needed, 2 were launched" in text) == (22, True), text


def test_the_kubernetes_example_runs_a_pod_for_each_index(repository: Repository) -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes_job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert container["command"][:2] == ["bash", "-c"]
    here = {**given, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "RANKS": "1"}
    pods = [
        shell(
            repository.root,
            container["command"][2],
            JOB_COMPLETION_INDEX=str(index),
            PYTEST_ADDOPTS=FEW_ON_RANKS,
            **here,
        )
        for index in range(job["spec"]["completions"])
    ]
    (code, text), (other, silent) = map(ended, pods)
    assert (code, other) == (0, 0), text + silent
    assert "1 passed" in text
