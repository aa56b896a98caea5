"""The protocol's levels, and the circuit breaker in a loop of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.audit import checkpoints
from fixtures.audit.audit import Audit, AuditStopped
from fixtures.audit.fingerprint import Fingerprint, Measure
from fixtures.audit.fixed import Fixed, Limits
from fixtures.audit.history import History, Moments
from fixtures.audit.probes import length_deviation, prediction_figures
from fixtures.audit.protocol import Alarm, AnyProtocol, Calibrated, Observation
from fixtures.distributed.pool import RankPool
from fixtures.distributed.ranks import Rank
from fixtures.numerics import audit_bounds


def measure(norm: float, direction: int = 0) -> Measure:
    projections = [0.0] * 8
    projections[direction] = norm * math.sqrt(8.0)
    return Measure(norm, tuple(projections), hash((norm, direction)))


def seen(
    step: int,
    norms: Mapping[str, float],
    *,
    weight: float = 1.0,
    loss: float = 1.0,
    probe: Mapping[str, float] | None = None,
) -> Observation:
    measures = {name: measure(norm) for name, norm in norms.items()}
    weights = dict.fromkeys(norms, weight)
    return Observation(Fingerprint(step, 0, measures, False), weights, loss, probe or {}, {})


def noisy(steps: int, *, sigma: float = 0.1, drift: float = 0.0, start: int = 0) -> Iterator[dict]:
    """Norms of six layers whose logarithms are normal; that of "c" grows from ``start`` on."""
    generator = np.random.Generator(np.random.Philox(3))
    for step in range(steps):
        logs = sigma * generator.standard_normal(6)
        logs[2] += drift * max(step - start, 0)
        yield dict(zip("abcdef", 10.0**logs, strict=True))


def judged(protocol: AnyProtocol, steps: Iterator[dict]) -> list[Alarm]:
    return [a for step, norms in enumerate(steps) for a in protocol.judge(seen(step, norms))]


class TestHistory:
    def test_normal_figures_raise_nothing_and_a_jump_does(self) -> None:
        protocol = Calibrated(steps=1000)
        assert judged(protocol, noisy(1000)) == []
        norms = dict.fromkeys("abcdef", 1.0) | {"c": 100.0}
        (alarm,) = protocol.judge(seen(1000, norms))
        assert (alarm.step, alarm.level, alarm.parameter) == (1000, "step", "c")
        assert alarm.value > alarm.limit > 5

    def test_limit_is_as_rare_as_promised(self) -> None:
        """At a chance of 1e-3 for each of 100,000 exponential departures: some, under 200."""
        history = History(100, warmup=20, chance=1e-3)
        generator = np.random.Generator(np.random.Philox(5))
        beyond = 0
        for _ in range(1000):
            figures = generator.laplace(size=100)
            beyond += int((history.departures(figures) > history.limit).sum())
            history.add(figures)
        assert 1 <= beyond < 200

    def test_outlier_does_not_enter(self) -> None:
        history = History(5, warmup=20, chance=1e-9)
        generator = np.random.Generator(np.random.Philox(5))
        for _ in range(100):
            history.add(generator.standard_normal(5))
        before = history.mean.copy()
        history.add(np.array([0.0, 1e6, 0.0, 0.0, math.nan]))
        assert history.mean[1] == before[1]
        assert history.mean[4] == before[4]
        assert history.mean[0] != before[0]

    def test_memory_does_not_grow(self) -> None:
        protocol = Calibrated(window=10)
        sizes = []
        for step, norms in enumerate(noisy(400)):
            protocol.judge(seen(step, norms))
            if step in (200, 399):
                sizes.append(len(json.dumps(protocol.state_dict(), default=np.size)))
        assert abs(sizes[1] - sizes[0]) < 100  # digits of counters

    def test_state_goes_back(self) -> None:
        one, other = Calibrated(window=10), Calibrated(window=10)
        judged(one, noisy(150))
        other.load_state_dict(one.state_dict())
        for protocol in (one, other):
            judged(protocol, noisy(50))
        assert json.dumps(one.state_dict(), default=list) == json.dumps(
            other.state_dict(), default=list
        )

    def test_moments_are_those_of_the_sample(self) -> None:
        moments = Moments()
        for value in (1.0, 2.0, 4.0):
            moments.add(value)
        assert moments.mean == pytest.approx(7 / 3)
        assert moments.deviation == pytest.approx(np.std([1, 2, 4]))


class TestLevels:
    def test_slow_drift_is_seen_by_the_trend_alone(self) -> None:
        """0.08 decades a step, less than a step's noise, which the running mean follows."""
        alarms = judged(Calibrated(steps=1500, window=25), noisy(1200, drift=0.08, start=1000))
        assert {(a.level, a.parameter) for a in alarms} == {("trend", "c")}
        assert alarms[0].step < 1100

    @pytest.mark.parametrize("same", [True, False])
    def test_distance_from_a_clean_run(self, same: bool) -> None:
        """Another environment's distance, some 1e-6, is history; a jump to 5 % is not."""
        clean = {s: seen(s, n).gradient for s, n in enumerate(noisy(300))}
        protocol = Calibrated(trail=clean, same_environment=same, steps=300)
        error = 0.0 if same else 1e-6
        for step, norms in enumerate(noisy(250)):
            size = error * (1 + step % 3)
            assert protocol.judge(seen(step, {n: v * (1 + size) for n, v in norms.items()})) == []
        norms = {n: m.norm * (1 + error) for n, m in clean[250].measures.items()}
        (alarm,) = protocol.judge(seen(250, norms | {"d": norms["d"] * 1.05}))
        assert alarm.parameter == "d"

    def test_what_is_not_finite_is_named(self) -> None:
        alarms = Calibrated().judge(seen(3, {"a": 1.0, "b": math.nan}, loss=math.inf))
        assert [(a.parameter, a.limit) for a in alarms] == [("b", 0.0), ("", 0.0)]
        assert str(alarms[0]).startswith("step 3, rank 0, step level: b: norm of the gradient")

    def test_probe_is_held_to_its_limits(self) -> None:
        limit = audit_bounds.of_clean_runs([1e-7, 2e-7, 1.5e-7, 3e-7], 1e-3)
        protocol = Calibrated(probe_limits={"kl": limit})
        assert protocol.judge(seen(0, {"a": 1.0}, probe={"kl": 2e-7})) == []
        (alarm,) = protocol.judge(seen(1, {"a": 1.0}, probe={"kl": math.nan}))
        assert (alarm.level, alarm.figure) == ("end_to_end", "kl")
        with pytest.raises(ValueError, match="does not report kl"):
            protocol.judge(seen(2, {"a": 1.0}, probe={"KL": 0.0}))

    def test_fixed_limits_ring_on_a_healthy_run(self) -> None:
        alarms = judged(Fixed(), noisy(100))
        assert len(alarms) > 300
        assert {(a.figure, a.stops) for a in alarms} == {("change of the gradient's norm", False)}

    def test_fixed_limits_of_weights_probe_and_windows(self) -> None:
        protocol = Fixed(Limits(window=10, windows=2, norm_change=math.inf))
        alarms = []
        for step in range(20):
            observation = seen(
                step,
                {"a": 1.0},
                weight=1.0 + step % 2,
                loss=float(step),
                probe={"kl": 0.02, "agreement": 0.9} if step == 5 else None,
            )
            alarms += protocol.judge(observation)
        assert {(a.level, a.figure) for a in alarms} == {
            ("step", "drift of the parameter's norm"),
            ("end_to_end", "KL divergence"),
            ("end_to_end", "disagreement"),
            ("trend", "standard deviation of the loss"),
            ("trend", "coefficient of variation of the parameter's norm"),
        }


class TestBounds:
    def test_excess_is_the_quantile_of_an_exponential_tail(self) -> None:
        generator = np.random.Generator(np.random.Philox(2))
        values = generator.exponential(size=100_000)
        tail = values[values > 2] - 2
        found = audit_bounds.excess(len(tail), float(tail.sum()), len(values), 2.0, 1e-6)
        assert -math.log(1e-6) < found < -math.log(1e-6) * 1.1

    @pytest.mark.parametrize(
        ("values", "message"),
        [([1.0, 2.0], "2 clean runs"), ([0.0, 1.0, 1.0], "some clean runs show 0")],
    )
    def test_limits_of_too_few_or_mixed_runs_are_refused(
        self, values: list[float], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            audit_bounds.of_clean_runs(values, 1e-6)

    def test_clean_runs_that_are_equal_allow_nothing(self) -> None:
        assert audit_bounds.of_clean_runs([0.0, 0.0, 0.0], 1e-6) == 0


class TestProbes:
    def test_figures_of_two_predictions(self) -> None:
        reference = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])  # 1/2 1/2; 1/4 3/4
        logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
        found = prediction_figures(logits, reference)
        kl = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)
        assert found == pytest.approx({"kl": kl / 2, "agreement": 0.5})
        assert prediction_figures(logits, logits) == {"kl": 0.0, "agreement": 1.0}

    def test_other_prompts_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
            prediction_figures(torch.zeros(2, 3), torch.zeros(2, 4))

    def test_length_deviation(self) -> None:
        assert length_deviation([1, 3]) == 1.0


# --- the circuit breaker -------------------------------------------------------------------------


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


def test_one_bit_on_one_of_two_ranks_stops_both(tmp_path: Path) -> None:
    with RankPool(preload=[__name__]) as pool:
        for order, (text,) in pool.run(copies, 2, str(tmp_path)):
            assert order == [0, 1, 2, 0, 1, 2, 3]
            assert "weight: gradients differ between copies of the model, on ranks [0, 1]" in text
