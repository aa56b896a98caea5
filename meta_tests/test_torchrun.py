"""Under torchrun: the ranks that it started do the jobs, and end together, with one verdict."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meta_tests.running import Repository, copy_repository, environment, read_json

ENDED_WITHIN_S = 120.0
LAST_RANK_SKIPS = "reduce_rank_skipped"
RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}

CHECKS = """
    def total(rank, victim):
        if rank.index == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        share = torch.ones(1)
        dist.all_reduce(share)
        return share.item()

    def break_in_one(rank):
        print(f"rank {rank.index} was here")
        if rank.index == 1:
            raise ArithmeticError("gradient of layer 3 is odd")
        dist.barrier()

    class TestOp:
        def test_alone(self, check):
            with open("alone", "a") as file:
                file.write("once ")
            check.exact(dist.is_initialized(), False)

        @pytest.mark.parametrize("world_size", [2, 1, 3, 4, 8])
        def test_sound(self, check, ranks, world_size):
            check.exact(ranks(total, world_size, None), [float(world_size)] * world_size)
            check.exact(dist.is_initialized(), False, name="left")
"""
FAILING = """
        @pytest.mark.takes_ranks(3)
        def test_breaks(self, check, ranks):
            ranks(break_in_one, 3)

        @pytest.mark.takes_ranks(3)
        def test_sound_again(self, check, ranks):
            check.exact(ranks(total, 3, None), [3.0] * 3)
"""
KILLED = """
        def test_killed(self, check, ranks):
            ranks(total, 2, {victim})

        def test_later(self, check):
            check.exact(1, 1)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return copy_repository(tmp_path)


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        free: int = server.getsockname()[1]
    return free


def agent(repository: Repository, *options: object) -> subprocess.Popen[str]:
    """A torchrun agent; the options of pytest follow those of torchrun after "pytest"."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, options)]
    place = command.index("pytest") + 1
    command[place:place] = ["-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
    return subprocess.Popen(
        command,
        cwd=repository.root,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*agents: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit code and output of each agent, all of which have to end by themselves."""
    try:
        texts = [agent.communicate(timeout=2 * ENDED_WITHIN_S)[0] for agent in agents]
        return [(agent.returncode, text) for agent, text in zip(agents, texts, strict=True)]
    finally:
        for agent in agents:
            agent.kill()


def verdict_of(repository: Repository) -> tuple[int, dict[str, str]]:
    """The code that the record carries, and the verdict of each case."""
    record = repository.root / "record"
    cases = read_json(record / "verdict.json")["cases"]
    code = repository.run("exit-code", record, module="reports").code
    return code, {case.split("/")[2]: judged["verdict"] for case, judged in cases.items()}


def test_four_ranks_of_one_agent_share_jobs_and_one_failure(repository: Repository) -> None:
    repository.write_checks(CHECKS + FAILING)
    [(code, text)] = ended(
        agent(repository, "--nproc-per-node=4", "-m", "pytest", "--record=record")
    )
    assert code == 1, text
    assert text.count("verdict: an error of the run") == 1  # one rank reports
    assert text.count("report: record/report.html") == 1
    assert "1 failed, 6 passed, 1 skipped" in text
    assert (repository.root / "alone").read_text() == "once "
    first = r"raised ArithmeticError: gradient of layer 3 is odd in precision_tests.test_weight"
    assert "RankFailure: rank 1 (host " in text
    assert first in text
    assert 'raise ArithmeticError("gradient of layer 3 is odd")' in text
    assert "output of rank 1:" in text
    assert "rank 1 was here" in text
    assert "rank 2 was here" not in text
    judged = {f"sound-{n}": "PASS" for n in (1, 2, 3, 4)}
    judged |= {f"sound-{n}-left": "PASS" for n in (1, 2, 3, 4)}
    judged |= {"alone": "PASS", "sound-again": "PASS", "breaks-call-error": "UNVERIFIED"}
    judged |= {"sound-8": "UNVERIFIED"}
    assert verdict_of(repository) == (3, judged)
    assert "8 ranks are needed, 4 were launched" in text


def test_a_killed_rank_of_another_agent_ends_the_run_with_its_name(
    repository: Repository, port: int
) -> None:
    repository.write_checks(CHECKS + KILLED.format(victim=1))
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=meta")
    started = time.monotonic()
    agents = [
        agent(repository, "--nnodes=2", *meeting, "-m", "pytest", "--record=record")
        for _ in range(2)
    ]
    (one, other), (code, text) = sorted(ended(*agents), key=lambda pair: "Interrupted" in pair[1])
    assert time.monotonic() - started < ENDED_WITHIN_S
    assert (one, code) == (1, 1)
    assert "(SIGKILL)" in other
    lost = r"was lost: it died, or cannot be reached"
    assert f"{lost}: the run ends" in text
    assert "Interrupted: rank 1 (host " in text
    assert f"{lost} in precision_tests.test_weight_update:total" in text
    code, cases = verdict_of(repository)
    assert code == 2
    assert cases["killed-call-error"] == "UNVERIFIED"
    assert "later" not in cases


def test_a_killed_rank_0_ends_the_others(repository: Repository) -> None:
    repository.write_checks(CHECKS + KILLED.format(victim=0))
    [(code, text)] = ended(agent(repository, "--nproc-per-node=2", "-m", "pytest", "-kkilled"))
    assert code == 1
    assert "rank       : 0 (local_rank: 0)\n  exitcode   : -9" in text.replace("  :", "   :")


def test_a_rank_that_hangs_ends_the_run_with_its_name(repository: Repository) -> None:
    repository.edit("fixtures/distributed/torchrun.py", "MARGIN_S = 10.0", "MARGIN_S = 1.0")
    repository.write_checks(
        """
        def hang_in_one(rank):
            if rank.index == 1:
                signal.pause()
            dist.barrier()

        class TestOp:
            def test_hangs(self, check, ranks):
                ranks(hang_in_one, 2)

            def test_later(self, check):
                check.exact(1, 1)
        """
    )
    options = ("--record=record", "--rank-timeout=2")
    [(code, text)] = ended(agent(repository, "--nproc-per-node=2", "-m", "pytest", *options))
    assert code == 1
    assert "gave no answer within 2 s in precision_tests.test_weight_update:hang_in_one" in text
    assert "Interrupted: rank 1 (host " in text
    assert "then rank 0 raised RuntimeError: " in text
    assert verdict_of(repository) == (2, {"hangs-call-error": "UNVERIFIED"})


def test_checks_of_a_node_pass_on_two_static_agents(tmp_path: Path, port: int) -> None:
    """One of which says that it is on another host: then that is part of the environment."""
    repository = copy_repository(tmp_path, "all_reduce")
    told = "(launch.rank, platform.node(), os.getpid())"
    other = "(launch.rank, 'another', os.getpid())"
    repository.edit("fixtures/distributed/meeting.py", told, other)
    meeting = ("--nnodes=2", "--master-addr=localhost", f"--master-port={port}")
    options = ("-m", "pytest", "-ktest_data_parallel and w2", "--record=record")
    (code, text), (other, silent) = ended(
        *(agent(repository, *meeting, f"--node-rank={n}", *options) for n in range(2))
    )
    assert (code, other) == (0, 0), text + silent
    assert "(exit code 0)" in text
    assert "PASS" not in silent
    code, cases = verdict_of(repository)
    assert (code, set(cases.values())) == (0, {"PASS"})
    assert read_json(repository.root / "record" / "cases.json")["environment"]["cpu"]["hosts"] == 2


def test_a_fault_is_in_every_rank(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "all_reduce")
    options = (
        "-m",
        "pytest",
        "-ktest_sum and w2 and fp32",
        "--record=record",
        f"--inject={LAST_RANK_SKIPS}",
    )
    [(code, text)] = ended(agent(repository, "--nproc-per-node=2", *options))
    assert code == 1, text
    assert f"INJECTED: this run was made under the deliberate fault {LAST_RANK_SKIPS}" in text
    code, cases = verdict_of(repository)
    assert (code, set(cases.values())) == (1, {"REGRESSION"})


def test_ranks_that_collect_other_tests_are_refused(repository: Repository) -> None:
    repository.write_checks(
        """
        class TestOp:
            @pytest.mark.parametrize("local", [os.environ.get("LOCAL_RANK")])
            def test_it(self, check, local):
                check.exact(1, 1)
        """
    )
    [(code, text)] = ended(agent(repository, "--nproc-per-node=2", "-m", "pytest"))
    assert code == 1
    assert "ERROR: rank 1 (host " in text
    assert "collected 1 tests, rank 0 1: lacking precision_tests/test_weight_update.py" in text
    assert "start every node with the same command, files and environment variables" in text


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["-n2"], {"MASTER_PORT": "1"}, "xdist cannot be used under torchrun"),
        (["--golden=propose"], {"MASTER_PORT": "1"}, "run it without torchrun"),
        ([], {}, "but not MASTER_PORT: launch with torchrun, or unset RANK and WORLD_SIZE"),
        (["--rank-timeout=0"], {"MASTER_PORT": "1"}, "--rank-timeout 0.0: give seconds above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    repository: Repository, arguments: list[str], environ: dict[str, str], message: str
) -> None:
    repository.write_checks(CHECKS)
    run = repository.run(*arguments, **RANKS, **environ)
    assert run.code == 4
    assert message in run.text
