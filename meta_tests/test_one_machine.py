"""What a machine's GPUs decide: which checks over ranks there are, and what each process sees.

The GPUs are named by a plugin, not there: what would compute on them is left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from fixtures import devices, plugin
from fixtures.distributed import ranks
from fixtures.distributed.pool import RankPool, RanksUnavailable
from fixtures.distributed.ranks import Group, Member, Rank, Request
from fixtures.own_model.factory import seeded
from meta_tests.running import Repository, copy_repository

H100 = "NVIDIA H100 80GB HBM3/9.0"
NAMED_GPUS = """
from fixtures import devices, environment, switches

GPUS = (devices.Gpu("NVIDIA H100 80GB HBM3", (9, 0)),) * {count}


def visible():
    import os
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return GPUS[: len(chosen.split(","))] if chosen else GPUS


devices.visible_gpus = visible
switches.lost_precision = lambda device: ""
environment._cuda = lambda device: {{"gpu": "named"}}
"""
CHECKS = """
class TestOp:
    def test_alone(self, check, device):
        check.exact(1, 1)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_over_ranks(self, check, ranks, world_size):
        ranks(dist.barrier, world_size)
"""


def repository_with(folder: Path, gpus: int, checks: str = CHECKS) -> Repository:
    repository = copy_repository(folder)
    repository.write_checks(checks)
    (repository.root / "named_gpus.py").write_text(NAMED_GPUS.format(count=gpus))
    return repository


class TestRanks:
    @pytest.mark.parametrize("workers", ["0", "1"])
    def test_one_gpu_has_no_case_for_two_ranks_and_the_verdict_says_so(
        self, tmp_path: Path, workers: str
    ) -> None:
        repository = repository_with(tmp_path, gpus=1)
        chosen = ("-p", "named_gpus", "-n", workers, "-m", "h100")
        ended = repository.run(*chosen)
        said = "verdict: every verified case holds; ranks not checked: 1 GPU (h100) (exit code 0)"
        assert (ended.code, said in ended.text) == (0, True), ended.text
        assert "UNVERIFIED" not in ended.text
        required = repository.run(*chosen, "--require", "ranks")
        assert required.code == 22, required.text
        assert "2 ranks need 2 GPUs, 0 visible" in required.text

    @pytest.mark.parametrize(
        ("gpus", "selected", "sizes"),
        [
            (1, "h100", []),
            (3, "h100", ["2"]),
            (4, "h100", ["2", "4"]),
            (1, "h100 and ranks", ["2", "4"]),
            (1, "h100 or ranks", ["cpu-2", "cpu-4"]),
        ],
    )
    def test_more_ranks_than_gpus_are_no_case_unless_ranks_are_asked_for(
        self, tmp_path: Path, gpus: int, selected: str, sizes: list[str]
    ) -> None:
        repository = copy_repository(tmp_path)
        repository.write_checks(CHECKS)
        ended = repository.run(
            *("--collect-only", "-q", "-m", selected),
            PRECISION_SIMULATED_GPUS=",".join([H100] * gpus),
        )
        found = re.findall(r"test_over_ranks\[(?:h100-)?(.+)\]", ended.text)
        assert found == sizes

    def test_on_gpus_come_last_by_world_size(self, tmp_path: Path) -> None:
        repository = copy_repository(tmp_path)
        other = CHECKS.replace("[2, 4]", "[4, 1]").replace("TestOp", "TestFlow")
        repository.write_checks(CHECKS + other)
        ended = repository.run(
            *("--collect-only", "-q", "-m", "h100"),
            PRECISION_SIMULATED_GPUS=",".join([H100] * 4),
        )
        found = re.findall(r"::test_(\w+)\[h100-?(.*)\]", ended.text)
        assert [size for _, size in found] == ["", "", "1", "2", "4", "4"]

    def test_more_of_them_than_a_check_says_are_refused(self, tmp_path: Path) -> None:
        checks = """
        def nothing(rank):
            pass

        class TestOp:
            @pytest.mark.takes_ranks(1)
            def test_ranks(self, check, ranks):
                ranks(nothing, 2)
        """
        repository = copy_repository(tmp_path)
        repository.write_checks(checks)
        ended = repository.run()
        assert ended.code == 3, ended.text
        assert "the check runs on 2 ranks and says 1: give it a parameter world_size" in ended.text


def refuse(rank: Rank) -> None:
    raise RanksUnavailable("this release refuses it")


def index_of(rank: Rank) -> int:
    return rank.index


class OnGpus(RankPool):
    """Ranks on the CPU, whose failures are judged as if they were on GPUs."""

    def _check(self, *arguments: object) -> None:  # type: ignore[override]
        self._device_type = "cuda"
        try:
            super()._check(*arguments)  # type: ignore[arg-type]
        finally:
            self._device_type = "cpu"


def test_a_torch_without_nccl_has_no_ranks_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    member = Member(0, 0, lambda group: pytest.fail("a group was begun"))
    asked = Request(Group(1, "store", 1.0, "cuda"), f"{__name__}:index_of", None, b"")
    answer = member.answer(asked)
    assert answer.unavailable == f"torch {torch.__version__} is built without NCCL"


def test_a_refused_job_ends_no_rank_on_a_gpu() -> None:
    with OnGpus(preload=[__name__]) as pool:
        pool.run(index_of, 2)
        before = pool.pids
        with pytest.raises(RanksUnavailable, match="this release refuses it"):
            pool.run(refuse, 2)
        assert pool.run(index_of, 2) == [0, 1]
        assert pool.pids == before


@pytest.mark.parametrize(
    ("chosen", "in_switch", "set_to"),
    [
        (None, False, "^NVLS,NVLSTree"),
        (None, True, None),
        ("Ring", False, "Ring"),
        ("Ring", True, "Ring"),
    ],
)
def test_nccl_adds_in_no_switch_unless_it_is_asked_to(
    chosen: str | None, in_switch: bool, set_to: str | None
) -> None:
    assert ranks.algorithms(chosen, in_switch=in_switch) == set_to


def test_an_absent_optional_package_is_listed_and_counts_only_where_it_is_required(
    tmp_path: Path,
) -> None:
    checks = """
    class TestOp:
        @pytest.mark.needs_package("no_such_package", "zero")
        def test_with_it(self, check, device):
            check.exact(1, 2)

        @pytest.mark.needs_package("torch", "zero")
        def test_without(self, check, device):
            check.exact(1, 1)
    """
    repository = repository_with(tmp_path, gpus=1, checks=checks)
    listed = repository.run("-p", "named_gpus", "-m", "h100")
    reason = "no_such_package is not installed: pip install training-precision-suite[zero]: weight"
    assert (listed.code, reason in listed.text) == (0, True), listed.text
    assert repository.run("-p", "named_gpus", "-m", "h100", "--require", "h100").code == 22


# --- what each process sees ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "caller", "count"),
    [
        (0, None, 0),
        (8, None, 8),
        (8, "3", 1),
        (8, "3, 5", 2),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,9,1", 1),
        (8, "GPU-8f1c,MIG-77aa", 2),
        (0, "GPU-8f1c", 0),
    ],
)
def test_visible_gpus_are_counted_without_torch(files: int, caller: str | None, count: int) -> None:
    assert devices.count_visible(files, caller) == count


@pytest.mark.parametrize(("visible", "workers"), [(None, 16), ("3", 2), ("3,5", 4), ("", None)])
def test_auto_makes_two_workers_for_each_visible_gpu(
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    visible: str | None,
    workers: int | None,
) -> None:
    files = [Path(f"/dev/nvidia{number}") for number in range(8)]
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(files))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == workers


def test_a_model_is_loaded_after_its_worker_was_pinned(tmp_path: Path) -> None:
    repository = repository_with(tmp_path, gpus=2)
    (repository.root / "sees.py").write_text(
        "import os, pathlib\n"
        "from torch import nn, ones\n"
        "worker = os.environ.get('PYTEST_XDIST_WORKER', 'controller')\n"
        "pathlib.Path(worker).write_text(str(os.environ.get('CUDA_VISIBLE_DEVICES')))\n"
        "def factory():\n"
        "    return nn.Linear(2, 2), lambda model, batch: model(batch).sum(), [ones(2)]\n"
    )
    ended = repository.run(
        *("-p", "named_gpus", "-n", "2", "-m", "h100", "-k", "alone", "--model", "sees:factory"),
        CUDA_VISIBLE_DEVICES="5,3",
    )
    assert ended.code == 0, ended.text
    assert [(repository.root / worker).read_text() for worker in ("gw0", "gw1")] == ["5", "3"]


def test_ranks_on_the_cpu_see_no_gpu(tmp_path: Path) -> None:
    checks = """
    def visible(rank):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    class TestOp:
        def test_ranks(self, check, ranks):
            check.exact(ranks(visible, 2), ["", ""])
    """
    repository = copy_repository(tmp_path)
    repository.write_checks(checks)
    ended = repository.run(CUDA_VISIBLE_DEVICES="0")
    assert ended.code == 0, ended.text


def test_seeding_begins_to_use_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*_: object) -> int:
        raise AssertionError("a GPU was asked about")

    for name in ("device_count", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, used)
    with seeded(3):
        drawn = torch.rand(3)
    with seeded(3):
        assert torch.equal(torch.rand(3), drawn)
