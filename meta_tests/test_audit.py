"""The protocol's levels and their limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.audit.fingerprint import Fingerprint, Measure
from fixtures.audit.fixed import Fixed, Limits
from fixtures.audit.history import History, Moments
from fixtures.audit.probes import length_deviation, parameter_distance, prediction_figures
from fixtures.audit.protocol import Alarm, AnyProtocol, Calibrated, Observation
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
        (alarm,) = protocol.judge(seen(1, {"a": 1.0}, probe={"kl": 1.0}))
        assert (alarm.level, alarm.figure) == ("end_to_end", "kl")
        with pytest.raises(ValueError, match="does not report kl"):
            protocol.judge(seen(2, {"a": 1.0}, probe={"KL": 0.0}))

    @pytest.mark.parametrize("protocol", [Calibrated, Fixed])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_probe_that_is_not_finite_needs_no_limit(
        self, protocol: type[Calibrated | Fixed], value: float
    ) -> None:
        (alarm,) = protocol().judge(seen(1, {"a": 1.0}, probe={"mine": value}))
        assert (alarm.level, alarm.stops) == ("end_to_end", True)
        assert alarm.figure == "mine of the probe is not finite:"

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

    @pytest.mark.parametrize("off", [0.0, 0.9, 1.1, math.nan])
    def test_parameters_are_as_close_as_assert_close_wants(self, off: float) -> None:
        model = nn.Linear(3, 2)
        reference = {name: p.detach().clone() for name, p in model.named_parameters()}
        tolerance = 1e-5 + 1e-3 * reference["weight"][1, 2].abs()
        with torch.no_grad():
            model.weight[1, 2] += off * tolerance
        found = parameter_distance(model, reference)["parameters"]
        assert found == pytest.approx(off, abs=0.01, nan_ok=True)
        try:
            torch.testing.assert_close(model.weight, reference["weight"], atol=1e-5, rtol=1e-3)
            close = True
        except AssertionError:
            close = False
        alarms = Fixed().judge(seen(0, {"a": 1.0}, probe={"parameters": found}))
        assert [alarm.level for alarm in alarms] == [] if close else ["end_to_end"]

    def test_reference_of_another_model_is_refused(self) -> None:
        with pytest.raises(ValueError, match="has no parameter bias"):
            parameter_distance(nn.Linear(2, 2), {"weight": torch.zeros(2, 2)})

    def test_lengths_are_judged_where_a_limit_is_given(self) -> None:
        probe = {"length_deviation": 3.0}
        assert Fixed().judge(seen(0, {"a": 1.0}, probe=probe)) == []
        limits = Limits(length_deviation=2.0)
        (alarm,) = Fixed(limits).judge(seen(0, {"a": 1.0}, probe=probe))
        assert (alarm.figure, alarm.limit) == ("deviation of the lengths", 2.0)

    def test_length_deviation(self) -> None:
        assert length_deviation([1, 3]) == 1.0
