"""Runs in which something dies, is interrupted or runs out of space: what is left, what is said."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from meta_tests.running import Repository, copy_repository, read_json


def test_a_killed_rank_is_an_error_of_the_run_and_no_regression(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        def total(rank, victim):
            if rank.index == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            share = torch.ones(1)
            dist.all_reduce(share)
            return share.item()

        class TestOp:
            def test_killed(self, check, ranks):
                check.exact(ranks(total, 2, 1), [2.0, 2.0])

            def test_sound(self, check, ranks):
                check.exact(ranks(total, 2, None), [2.0, 2.0])
        """
    )
    ended = repository.run("--record", "record")
    assert ended.code == 3
    assert "1 failed, 1 passed" in ended.text
    assert "REGRESSION" not in ended.text
    once = "could not be measured, an error of the run (docs/verdicts.md):\n  rank 1 was ended by"
    assert ended.text.count(once) == 1
    assert (
        "rank 1 was ended by SIGKILL in precision_tests.test_weight_update:total" in ended.text
    ), ended.text
    cases = read_json(repository.root / "record" / "verdict.json")["cases"]
    assert {case_id: judged["verdict"] for case_id, judged in cases.items()} == {
        "weight_update/op/killed-call-error/cpu": "UNVERIFIED",
        "weight_update/op/sound/cpu": "PASS",
    }


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL in "),
        ("signal.pause()", "did not answer within 1 s in "),
        ("raise KeyError('mine')", "raised KeyError: 'mine' in "),
    ],
)
def test_hypothesis_does_not_hide_what_befell_a_rank_nor_ask_again(
    tmp_path: Path, job: str, why: str
) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        f"""
        import pathlib
        from hypothesis import given, strategies

        def befallen(rank, number):
            if rank.index == 0:
                with open("asked", "a") as file:
                    file.write("once ")
            if number > 3:
                {job}

        class TestBound:
            @given(strategies.integers(0, 9))
            def test_it(self, check, ranks, number):
                ranks(befallen, 2, number)
                check.exact(1, 1)
        """
    )
    ended = repository.run("--record", "record", "--rank-timeout=1")
    assert ended.code == 3, ended.text
    cases = read_json(repository.root / "record" / "verdict.json")["cases"]
    lost = cases["weight_update/bound/it-call-error/cpu"]
    assert lost["verdict"] == "UNVERIFIED"
    assert why in lost["detail"].partition("\n")[0]
    assert "Falsifying" not in ended.text
    assert len((repository.root / "asked").read_text().split()) < 20


def test_a_rank_whose_torch_raises_is_red(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        def multiply(rank):
            return torch.ones(2, 3) @ torch.ones(2, 3)

        class TestOp:
            def test_it(self, check, ranks):
                check.exact(ranks(multiply, 2), [])
        """
    )
    ended = repository.run("--record", "record")
    assert ended.code == 1
    cases = read_json(repository.root / "record" / "verdict.json")["cases"]
    judged = cases["weight_update/op/it-call-error/cpu"]
    assert judged["verdict"] == "REGRESSION"
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in judged["detail"]


def test_a_fork_that_the_system_refuses_is_an_error_of_the_run(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        from multiprocessing.context import ForkServerProcess

        def index(rank):
            return rank.index

        class TestOp:
            def test_it(self, check, ranks, monkeypatch):
                def refuse(process):
                    raise BlockingIOError(11, "Resource temporarily unavailable")

                monkeypatch.setattr(ForkServerProcess, "start", refuse)
                check.exact(ranks(index, 2), [0, 1])
        """
    )
    ended = repository.run("--record", "record")
    assert ended.code == 3
    why = "ranks could not be started: [Errno 11] Resource temporarily unavailable: precision_tests"
    assert why in ended.text
    assert "REGRESSION" not in ended.text


def test_a_worker_that_dies_is_a_case_that_could_not_be_measured(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            def test_dies(self, check, device):
                os._exit(3)

            def test_sound(self, check, device):
                check.exact(1, 1)
        """
    )
    ended = repository.run("-n", "1", "--record", "record")
    assert ended.code == 3
    written = read_json(repository.root / "record" / "verdict.json")
    assert written["matrix"]["weight_update"]["op"] == "PASS exact (1 unverified)"
    cases = {case_id: judged["verdict"] for case_id, judged in written["cases"].items()}
    assert cases.pop("weight_update/op/sound/cpu") == "PASS"
    [(lost, judged)] = cases.items()
    assert "dies" in lost
    assert judged == "UNVERIFIED"
    assert "worker 'gw0' crashed while running 'precision_tests/test_weight_update.py" in ended.text


def test_a_check_that_ends_without_a_measurement_verifies_nothing(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        from hypothesis import given, strategies

        class TestBound:
            def test_none(self, check):
                pass

            @given(number=strategies.integers(0, 9))
            def test_of_a_property(self, check, number):
                if number > 9:
                    check.exact(number, number)

            def test_sound(self, check):
                check.exact(1, 1)
        """
    )
    ended = repository.run("--record", "record")
    assert ended.code == 3
    assert "2 failed, 1 passed" in ended.text
    why = "the check ended without a measurement: it verifies nothing: "
    assert f"{why}precision_tests/test_weight_update.py::TestBound::test_none and 1 more" in (
        ended.text
    )
    assert "REGRESSION" not in ended.text


def test_a_module_that_cannot_be_imported_is_no_regression(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            def test_sound(self, check):
                check.exact(1, 1)
        """
    )
    (repository.root / "precision_tests" / "test_gelu.py").write_text("import an_absent_module")
    ended = repository.run("--continue-on-collection-errors", "--record", "record")
    assert ended.code == 3, ended.text
    assert "could not be collected" in ended.text
    assert "REGRESSION" not in ended.text


# --- Ctrl-C -------------------------------------------------------------------------------------

WAITING = """
    import pathlib, time

    def wait(rank):
        time.sleep(60)

    class TestOp:
        def test_sound(self, check, device):
            check.exact(1, 1)

        def test_waits(self, check, ranks):
            ranks(abs_index, 2)
            pathlib.Path("waiting").touch()
            ranks(wait, 2)

    def abs_index(rank):
        return rank.index
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_ends_everything_and_leaves_no_half_record(tmp_path: Path, workers: int) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(WAITING)
    process = repository.start("-n", workers)
    try:
        wait_for(repository.root / "waiting")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        text, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 2, text
    deadline = time.monotonic() + 10
    while (left := running_in(repository)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    runs = repository.root / "reports" / "runs"
    records = [path for path in runs.iterdir() if not path.is_symlink()] if runs.exists() else []
    assert not [path for path in records if path.name.startswith(".")]
    for record in records:
        assert read_json(record / "cases.json")["complete"] is False
        assert repository.run("exit-code", record, module="reports").code == 2
    if workers == 0:
        assert len(records) == 1
        assert "interrupted: the record holds what was measured so far" in text


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def running_in(repository: Repository) -> list[str]:
    """Command lines of the processes whose working directory is the repository."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == repository.root.resolve():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended meanwhile
            continue
    return found


# --- a full disk --------------------------------------------------------------------------------

MEASUREMENTS = {
    "cases.json": "for number in range(20): check.exact(number, number, name=str(number))",
    "tensors.safetensors": "check.exact(torch.zeros(4096), torch.zeros(4096))",
}


@pytest.mark.parametrize("too_large", MEASUREMENTS)
def test_a_record_that_cannot_be_written_is_said_and_not_begun(
    tmp_path: Path, too_large: str
) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        f"""
        class TestOp:
            def test_it(self, check, device):
                {MEASUREMENTS[too_large]}
        """
    )
    repository.record(to="records/whole")
    sizes = {p.name: p.stat().st_size for p in (repository.root / "records/whole").iterdir()}
    assert [name for name, size in sizes.items() if size > 8000] == [too_large]
    ended = repository.run("--record", "records/mine", file_limit=8000)
    assert ended.code == 3
    assert (
        "error: the record was not written to records/mine: File too large; make room" in ended.text
    )
    assert "the record could not be written (exit code 3)" in ended.text
    assert "Traceback" not in ended.text
    assert [path.name for path in (repository.root / "records").iterdir()] == ["whole"]


def test_a_proposal_that_cannot_be_written_is_withdrawn(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            def test_it(self, check):
                open("golden/.staging/observed", "w").close()  # where a folder has to be
                check.exact(1, 1)
        """
    )
    before = sorted((repository.root / "golden").rglob("*"))
    truth = repository.run("--golden=propose", file_limit=100_000)
    observed = repository.run("--golden=propose")
    for ended, why in ((truth, "File too large"), (observed, "Not a directory")):
        assert ended.code == 3
        assert "proposal withdrawn: " in ended.text
        assert f"could not be written ({why}); free space, then propose again" in ended.text
        assert "Traceback" not in ended.text
        assert sorted((repository.root / "golden").rglob("*")) == before
