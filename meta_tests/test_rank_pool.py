"""The rank pool: ranks are reused, every way to fail is reported, and the next job is sound."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from fixtures.distributed import ranks
from fixtures.distributed.pool import RankFailure, RankPool, RanksUnavailable
from fixtures.distributed.ranks import Rank

ROOT = Path(__file__).parent.parent
entered: list[str] = []  # in a rank: the arguments of `marked`, while it is entered


@contextlib.contextmanager
def marked(argument: str) -> Iterator[None]:
    entered.append(argument)
    yield
    entered.remove(argument)


def where(rank: Rank) -> tuple[int, int, int]:
    return rank.index, rank.world_size, os.getpid()


def total(rank: Rank, values: torch.Tensor, *, factor: int = 1) -> torch.Tensor:
    share = values[rank.index] * factor
    dist.all_reduce(share)
    return share


def surroundings(rank: Rank) -> tuple[list[str], int, set[str]]:
    launcher = {"RANK", "WORLD_SIZE", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"} & set(os.environ)
    return list(entered), torch.get_num_threads(), launcher


def raise_in_one(rank: Rank) -> None:
    if rank.index == 1:
        raise ArithmeticError("gradient of layer 3 is odd")
    dist.barrier()


def raise_in_all(rank: Rank) -> None:
    print(f"rank {rank.index} was here")
    raise ArithmeticError(f"rank {rank.index} too")


def leave(rank: Rank, code: int) -> None:
    if rank.index == 1:
        os._exit(code)
    dist.barrier()


def kill_self(rank: Rank, number: int) -> None:
    if rank.index == 2:
        os.kill(os.getpid(), number)
    dist.barrier()


def forget_the_barrier(rank: Rank) -> None:
    if rank.index != 1:
        dist.barrier()


def unpicklable(rank: Rank) -> object:
    return lambda: rank


def sleep(rank: Rank) -> None:
    time.sleep(60)


def interrupt_caller(rank: Rank, pid: int) -> None:
    os.kill(pid, signal.SIGINT)
    time.sleep(60)


PARENT = f"""
import os
from threading import Timer
from fixtures.distributed.pool import RankPool
from {__name__} import sleep, where
pool = RankPool()
pool.run(where, 2)
print(*pool.pids, flush=True)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(preload=[__name__]) as pool:
        yield pool


@pytest.fixture
def healing_pool(pool: RankPool) -> Iterator[RankPool]:
    """The pool; after the test it must do a job right, whatever happened to it."""
    yield pool
    values = torch.arange(4.0).reshape(4, 1)
    assert pool.run(total, 4, values) == [torch.tensor([6.0])] * 4


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestJobs:
    def test_results_come_by_rank(self, pool: RankPool) -> None:
        seen = pool.run(where, 4)
        assert [(index, world_size) for index, world_size, _ in seen] == [
            (0, 4),
            (1, 4),
            (2, 4),
            (3, 4),
        ]

    def test_ranks_are_reused_across_world_sizes(self, pool: RankPool) -> None:
        values = torch.arange(4.0)
        pids = {}
        for world_size in (4, 2, 3, 1, 4):
            sums = pool.run(total, world_size, values, factor=2)
            assert sums == [2 * values[:world_size].sum()] * world_size
            pids[world_size] = [pid for _, _, pid in pool.run(where, world_size)]
        assert all(pids[size] == pids[4][:size] for size in pids)
        assert tuple(pids[4]) == pool.pids

    def test_large_tensors_pass_both_ways(self, pool: RankPool) -> None:
        values = torch.arange(2.0**21).reshape(2, -1)
        assert torch.equal(pool.run(total, 2, values)[1], values.sum(0))

    def test_context_is_entered_around_each_job(self, pool: RankPool) -> None:
        pool.context = (f"{__name__}:marked", "sum_for_average")
        try:
            inside = pool.run(surroundings, 2)
        finally:
            pool.context = None
        outside = pool.run(surroundings, 2)
        assert [names for names, _, _ in inside] == [["sum_for_average"]] * 2
        assert [names for names, _, _ in outside] == [[], []]

    def test_environment_is_the_callers_without_its_launcher(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, "1")
        with RankPool(threads=2) as inheriting, RankPool(visible_devices=None) as unset:
            assert inheriting.run(surroundings, 1) == [([], 2, {"CUDA_VISIBLE_DEVICES"})]
            assert unset.run(surroundings, 1) == [([], 1, set())]
        assert os.environ["RANK"] == "1"


class TestRefusals:
    @pytest.mark.parametrize("world_size", [0, 5])
    def test_world_size_outside_the_pool(self, pool: RankPool, world_size: int) -> None:
        with pytest.raises(ValueError, match=rf"world size {world_size} is outside 1\.\.4.*max_"):
            pool.run(where, world_size)

    def test_a_job_without_an_importable_name(self, pool: RankPool) -> None:
        with pytest.raises(ValueError, match="top level of a module"):
            pool.run(lambda rank: rank.index, 2)

    def test_unknown_device_type(self) -> None:
        with pytest.raises(ValueError, match=r"'tpu'.*'cpu' or 'cuda'"):
            RankPool("tpu")

    def test_too_few_gpus(self) -> None:
        with RankPool("cuda", visible_devices="") as pool:
            for _ in range(2):
                with pytest.raises(RanksUnavailable, match="2 ranks need 2 GPUs, 0 visible"):
                    pool.run(where, 2)


class TestFailures:
    def test_exception_while_the_others_wait(self, healing_pool: RankPool) -> None:
        started = time.monotonic()
        with pytest.raises(RankFailure) as failure:
            healing_pool.run(raise_in_one, 4)
        assert time.monotonic() - started < healing_pool.timeout_s / 4
        assert failure.value.rank == 1
        text = str(failure.value)
        first_line = "rank 1 raised ArithmeticError: gradient of layer 3 is odd in "
        assert text.startswith(f"{first_line}{__name__}:raise_in_one\nTraceback")
        assert "raise ArithmeticError(" in text
        assert "ranks 0, 2, 3 did not answer" in text

    def test_exception_in_all_keeps_the_processes(self, healing_pool: RankPool) -> None:
        healing_pool.run(where, 3)
        pids = healing_pool.pids
        with pytest.raises(RankFailure) as failure:
            healing_pool.run(raise_in_all, 3)
        text = str(failure.value)
        assert all(f"rank {rank} raised ArithmeticError: rank {rank} too" in text for rank in "012")
        assert f"output of rank {failure.value.rank}:\nrank {failure.value.rank} was here" in text
        assert healing_pool.pids == pids

    def test_exit_names_rank_and_code(self, healing_pool: RankPool) -> None:
        with pytest.raises(RankFailure, match=r"^rank 1 exited with code 3 in \S+:leave"):
            healing_pool.run(leave, 4, 3)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_signal_names_rank_and_signal(
        self, healing_pool: RankPool, number: signal.Signals
    ) -> None:
        with pytest.raises(
            RankFailure, match=rf"^rank 2 was ended by {number.name} in "
        ) as failure:
            healing_pool.run(kill_self, 3, int(number))
        assert failure.value.rank == 2
        # Of a crash the rank can still say where it was.
        assert ("in kill_self" in str(failure.value)) == (number == signal.SIGSEGV)

    def test_hang_names_ranks_and_where_they_stand(self, healing_pool: RankPool) -> None:
        healing_pool.run(where, 3)
        healing_pool.timeout_s = 1.0
        try:
            with pytest.raises(RankFailure) as failure:
                healing_pool.run(forget_the_barrier, 3)
        finally:
            healing_pool.timeout_s = 60.0
        text = str(failure.value)
        assert text.startswith("ranks 0, 2 did not answer within 1 s in ")
        assert text.count("in forget_the_barrier") == 2
        assert "in barrier" in text

    def test_unpicklable_result(self, healing_pool: RankPool) -> None:
        with pytest.raises(RankFailure, match=r"^rank \d raised .*pickle"):
            healing_pool.run(unpicklable, 2)

    def test_interrupt_of_the_caller_ends_the_ranks(self, healing_pool: RankPool) -> None:
        healing_pool.run(where, 2)
        pids = healing_pool.pids
        with pytest.raises(KeyboardInterrupt):
            healing_pool.run(interrupt_caller, 1, os.getpid())
        assert not any(map(is_running, pids))


@pytest.mark.parametrize("caches", [("python", "fast_path"), ("python",), ()])
def test_a_group_that_is_left_leaves_no_mesh_in_any_cache(
    monkeypatch: pytest.MonkeyPatch, caches: tuple[str, ...]
) -> None:
    """torch 2.10 has two, and no function for both: a mesh was found whose groups are gone."""
    cleared = []
    for cache in ("python", "fast_path"):
        name = f"_clear_{cache}_sharding_prop_cache"
        if cache in caches:
            monkeypatch.setattr(debug, name, lambda cache=cache: cleared.append(cache))
        else:
            monkeypatch.delattr(debug, name)
    ranks._forget_meshes()
    assert cleared == [*caches]


class TestEnd:
    def test_close_leaves_no_process_and_no_file(self, tmp_path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(tmp_path))
            pool = RankPool()
            pool.run(where, 4)
            pids = pool.pids
            assert all(map(is_running, pids))
            assert list(tmp_path.iterdir())
            pool.close()
            pool.close()
        assert not any(map(is_running, pids))
        assert not list(tmp_path.iterdir())
        assert pool.pids == ()

    def test_ranks_end_with_their_parent(self, tmp_path: Path) -> None:
        kill = "Timer(0.3, os.kill, (os.getpid(), 9)).start()"
        ends = {"forgets to close": "", "is killed in a job": f"{kill}; pool.run(sleep, 2)"}
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PARENT + end],
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(tmp_path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for end in ends.values()
        ]
        for end, parent in zip(ends, started, strict=True):
            output, _ = parent.communicate()
            pids = [int(word) for word in output.split()]
            assert len(pids) == 2
            deadline = time.monotonic() + 5
            while any(map(is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not any(map(is_running, pids)), f"ranks outlive a parent that {end}"
        assert not list(tmp_path.glob("rank-pool-*"))
