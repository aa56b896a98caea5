"""The circuit breaker in a loop of its own: saves, stops, goes back, on one rank and on two."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fixtures.audit import checkpoints, fingerprint, trail
from fixtures.audit.audit import Audit, AuditStopped
from fixtures.distributed.pool import RankPool
from fixtures.distributed.ranks import Rank


class Loop:
    """Five lines of training, with dropout and a fault that can be switched on."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.audit = Audit(self.model, self.optimizer, folder, save_every=4, **options)
        self.order: list[int] = []

    def run(self, steps: int, faults: list[int] | None = None) -> Tensor:
        left = list(faults or [])
        for step in self.audit.steps(steps):
            self.order.append(step)
            self.optimizer.zero_grad()
            loss = self.model(torch.full((3, 4), step / 10)).square().mean()
            loss.backward()
            if step in left:
                left.remove(step)
                next(self.model.parameters()).grad.fill_(math.nan)
            if not self.audit.stops(loss.detach()):
                self.optimizer.step()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.mark.parametrize(
    ("fault", "back"),
    [(0, 0), (3, 0), (5, 0), (6, 4), (11, 8)],  # 4 and 8 are safe two steps later
)
def test_goes_back_to_the_last_safe_checkpoint(tmp_path: Path, fault: int, back: int) -> None:
    clean = Loop(tmp_path / "clean").run(12)
    loop = Loop(tmp_path / "faulty")
    assert torch.equal(loop.run(12, [fault]), clean)
    assert loop.order == [*range(fault + 1), *range(back, 12)]
    (event,) = [event for event in loop.audit.events if event.what == "rolled back"]
    assert (event.step, event.to_step) == (fault, back)
    assert "stopped 1 ranks before the optimizer wrote" in event.text
    lines = (tmp_path / "faulty" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == [e.what for e in loop.audit.events]


def test_fault_that_comes_again_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(AuditStopped, match="step 5 raised an alarm again after 2 returns"):
        loop.run(12, [5, 5, 5])


def test_two_safe_checkpoints_are_kept(tmp_path: Path) -> None:
    Loop(tmp_path).run(30)
    assert checkpoints.steps_in(tmp_path) == [20, 24, 28]


def test_old_folder_is_refused_and_resumed(tmp_path: Path) -> None:
    clean = Loop(tmp_path / "clean").run(12)
    Loop(tmp_path / "two").run(9)
    with pytest.raises(FileExistsError, match="resume=True"):
        Loop(tmp_path / "two")
    loop = Loop(tmp_path / "two", resume=True)
    assert torch.equal(loop.run(12), clean)
    assert loop.order == [8, 9, 10, 11]


@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
def test_damaged_checkpoint_is_named_and_an_earlier_one_taken(tmp_path: Path, damage: str) -> None:
    clean = Loop(tmp_path / "clean").run(12)
    loop = Loop(tmp_path / "faulty")
    loop.run(11)
    (path,) = (tmp_path / "faulty" / "step-000000008").glob("*.distcp")
    content = path.read_bytes()
    path.unlink()
    if damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    assert torch.equal(loop.run(12, [11]), clean)
    (said,) = [event.text for event in loop.audit.events if event.what == "damaged"]
    assert str(path) in said
    assert "take an earlier one" in said


def test_damaged_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """When the run comes by again: a later fault has a whole one to go back to."""
    loop = Loop(tmp_path)
    loop.run(7)
    (path,) = (tmp_path / "step-000000004").glob("*.distcp")
    path.write_bytes(b"")
    loop.run(8, [7, 7])
    assert loop.order == [*range(8), *range(8), 4, 5, 6, 7]


def test_error_of_torch_while_writing_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """torch's own for a failed rank is no Exception; a half-written folder is not left behind."""

    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointException("write", {})

    monkeypatch.setattr(checkpoints.state_dict_saver, "save", fails)
    with pytest.raises(checkpoints.CheckpointError, match="CheckpointException"):
        Loop(tmp_path).run(1)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_trail_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    Loop(tmp_path, record=True).run(9)
    path = tmp_path / "trail-rank0.jsonl"
    path.write_text(path.read_text()[:-40])
    Loop(tmp_path, record=True, resume=True).run(12)
    assert sorted(trail.read(path)) == list(range(12))


def test_empty_trail_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "trail").touch()
    with pytest.raises(ValueError, match=r"Audit\(\.\.\., record=True\)"):
        trail.read(tmp_path / "trail")


def test_judging_outside_the_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"for step in audit\.steps"):
        Loop(tmp_path).audit.stops(0.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3).double(),
        nn.Linear(3, 3).bfloat16(),
        nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1)),
        nn.ParameterList([torch.tensor(2.0), torch.ones(2, 2), torch.zeros(0, 3)]),
    ],
    ids=["fp64", "bf16", "sparse", "scalar-unused-empty"],
)
def test_models_of_any_kind_are_watched(tmp_path: Path, model: Any) -> None:
    """Also a loss that still has its graph."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = Audit(model, optimizer, tmp_path, full_every=1, save_every=1)
    for _ in audit.steps(3):
        optimizer.zero_grad()
        if isinstance(model, nn.Sequential):
            loss = model(torch.tensor([1, 2, 1])).square().sum()
        elif isinstance(model, nn.ParameterList):
            loss = model[0].square()
        else:
            loss = model(torch.ones(1, 3, dtype=model.weight.dtype)).sum()
        loss.backward()
        assert not audit.stops(loss)
        optimizer.step()


def test_crash_while_writing_leaves_no_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    loop = Loop(tmp_path)

    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "write_whole", full_disk)
    with pytest.raises(checkpoints.CheckpointError, match="rank 0: OSError: no space left"):
        loop.run(1)
    assert checkpoints.steps_in(tmp_path) == []


def test_overflow_can_be_left_to_the_scaler(tmp_path: Path) -> None:
    loop = Loop(tmp_path, overflow_skips=True)
    loop.optimizer.step = lambda: None  # type: ignore[method-assign]
    loop.run(3, [1])
    assert loop.order == [0, 1, 2]


def test_a_build_with_cuda_is_watched_where_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There ``get_device_module`` names CUDA's, whose generators cannot be asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda: torch.cuda)
    states = checkpoints.generator_states()
    assert states["gpu"] is None
    checkpoints.set_generator_states(states)


def test_probe_runs_without_touching_the_generators(tmp_path: Path) -> None:
    clean = Loop(tmp_path / "clean").run(12)
    drawn = []

    def probe() -> dict[str, float]:
        drawn.append(float(torch.rand(1)))
        return {"kl": 0.0}

    assert torch.equal(Loop(tmp_path / "probed", probe=probe, probe_every=3).run(12), clean)
    assert len(drawn) == 3


# --- over ranks ----------------------------------------------------------------------------------


def copies(rank: Rank, folder: str) -> tuple[list[int], list[str]]:
    """Two copies of a model; at step 2 one of them alone gets another gradient."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = Audit(model, optimizer, folder, save_every=2)
    order: list[int] = []
    for step in audit.steps(4):
        model.weight.grad = torch.ones(2, 3)
        if step == 2 and 2 not in order and rank.index == 1:
            model.weight.grad[0, 0] = 1 + 2**-23
        order.append(step)
        if not audit.stops(1.0):
            optimizer.step()
    return order, [event.text for event in audit.events if event.what == "alarm"]


def overflowing(rank: Rank, folder: str) -> tuple[list[int], list[str]]:
    """At step 2 the gradient overflows on one rank alone, where a scaler would skip the step."""
    model = nn.Linear(3, 2, bias=False)
    audit = Audit(model, torch.optim.SGD(model.parameters()), folder, overflow_skips=True)
    order: list[int] = []
    for step in audit.steps(4):
        odd = step == 2 and 2 not in order and rank.index == 1
        model.weight.grad = torch.full((2, 3), math.inf if odd else 1.0)
        order.append(step)
        audit.stops(1.0)
    return order, [event.what for event in audit.events]


def test_a_rank_that_skips_alone_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    with RankPool(preload=[__name__]) as pool:
        for order, events in pool.run(overflowing, 2, str(tmp_path)):
            assert order == [0, 1, 2, 0, 1, 2, 3]
            assert events == ["saved", "alarm", "rolled back"]


def partly_sharded(rank: Rank) -> dict[str, float]:
    """Norms of a model whose second layer alone is sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (rank.world_size,)))
    return {n: m.norm for n, m in fingerprint.take(model, 0, what="parameter").measures.items()}


def test_a_parameter_that_is_whole_beside_sharded_ones_counts_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    want = {n: float(p.detach().double().norm()) for n, p in model.named_parameters()}
    with RankPool(preload=[__name__]) as pool:
        for found in pool.run(partly_sharded, 2):
            assert found == pytest.approx(want, rel=1e-12)


def test_one_bit_on_one_of_two_ranks_stops_both(tmp_path: Path) -> None:
    with RankPool(preload=[__name__]) as pool:
        for order, (text,) in pool.run(copies, 2, str(tmp_path)):
            assert order == [0, 1, 2, 0, 1, 2, 3]
            assert "weight: gradients differ between copies of the model, on ranks [0, 1]" in text
