"""Tests of the training run's machinery: its noise, its figures, its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.numerics.bounds import trajectory_factor
from fixtures.numerics.formats import FP32, FP64, Format
from fixtures.training import generation, trajectory, trajectory_limits, trajectory_noise
from fixtures.training.generation import Generated
from fixtures.training.policies import POLICIES
from fixtures.training.reference import REFERENCE, ReferenceAdamW
from fixtures.training.step import Config, Training, build

CPU = torch.device("cpu")
END, SPACE = 256, ord(" ")


def gaussian(*shape: int, seed: int = 3) -> Tensor:
    generator = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(generator.standard_normal(shape))


# ---- the factor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 30])
def test_factor_holds_norms_of_any_rank_against_an_estimated_mean_square(rank: int) -> None:
    """One error is the worst case; its share of false alarms is the one asked for."""
    trials, draws, alarm = 100_000, 8, 0.01
    squares = gaussian(trials, draws + 1, rank).square().mean(-1)
    beyond = (
        squares[:, 0].sqrt() > trajectory_factor(1, draws, alarm) * squares[:, 1:].mean(1).sqrt()
    )
    share = float(beyond.double().mean())
    assert share <= alarm * 1.1
    if rank == 1:
        assert share >= alarm * 0.9


def test_factor_grows_with_entries_and_falls_with_draws() -> None:
    assert trajectory_factor(10, 32) < trajectory_factor(1000, 32) < trajectory_factor(1000, 8)
    for arguments in ((0, 8), (1, 1), (1, 8, 0.0)):
        with pytest.raises(ValueError, match="trajectory_factor needs entries"):
            trajectory_factor(*arguments)


# ---- noise --------------------------------------------------------------------------------------


def test_signs_have_the_variance_of_uniform_noise_and_a_stream_of_their_own() -> None:
    like = torch.empty(1001, 3)
    source = trajectory_noise.Signs("rounding", FP32, 1, "stream")
    first, second = source.uniform(like), source.uniform(like)
    assert torch.allclose(first.square(), torch.full_like(first, 1.0 / 3.0))
    assert abs(float(first.mean())) < 5.0 / math.sqrt(3.0 * like.numel())
    assert not torch.equal(first, second)
    again = trajectory_noise.Signs("rounding", FP32, 1, "stream")
    assert torch.equal(again.uniform(like), first)


def test_noisy_adamw_without_noise_is_adamw() -> None:
    """Noise of 2^-200 is lost in float64; the formulas differ by the order of their operations."""
    silent = Format("silent", 200, FP64.emin, FP64.emax)
    config, start = Config(), gaussian(50)
    results = []
    for noisy in (True, False):
        parameter = nn.Parameter(start.clone())
        optimizer = (
            trajectory_noise.NoisyAdamW(
                trajectory_noise.Signs("rounding", silent, 1, ""), [parameter], config
            )
            if noisy
            else ReferenceAdamW([parameter], config)
        )
        for seed in range(3):
            parameter.grad = gaussian(50, seed=seed)
            optimizer.step()
        results.append(parameter.detach())
    assert float((results[0] - results[1]).abs().max()) < 1e-15


def test_storage_noise_scales_with_the_format() -> None:
    """The loss of one step moves by about 2^16 times as much in bf16 as in fp32."""
    moved = {}
    want = trajectory.reference().steps.losses[0]
    for name in ("fp32", "bf16_autocast"):
        ops = trajectory_noise.rounding_ops(POLICIES[name].stored, 1, "meta")
        training = Training(build(trajectory.CONFIG, ops, CPU), ops, trajectory.CONFIG, CPU)
        moved[name] = abs(training.gradients(trajectory.batches()[0]).loss - float(want))
    assert 2.0**8 < moved["bf16_autocast"] / moved["fp32"] < 2.0**20


# ---- the run ------------------------------------------------------------------------------------


def test_reference_skips_the_step_that_overflows_and_learns() -> None:
    steps = trajectory.reference().steps
    assert steps.touched == []
    spoilt = steps.gradients[trajectory.OVERFLOW]["head.weight"]
    assert int((~spoilt.isfinite()).sum()) == 1
    assert float(steps.losses[-1]) < 0.6 * float(steps.losses[0])


def test_distance_from_itself_is_zero() -> None:
    want = trajectory.reference()
    found = trajectory.distance(want.steps, want.logits, want)
    assert {name: float(value.abs().max()) for name, value in found.items()} == dict.fromkeys(
        ("loss", "gradient", "parameter", "kl", "logits"), 0.0
    )


def test_distance_sees_one_moved_logit() -> None:
    want = trajectory.reference()
    moved = want.logits.clone()
    place = int(want.generated.first[0])
    moved[0, place] += 7.0  # of no effect: a shift
    moved[0, place, 5] += 0.5
    found = trajectory.distance(want.steps, moved, want)
    assert float(found["logits"][0, place]) == pytest.approx(0.5)
    assert int((found["logits"] > 0).sum()) == int((found["kl"] > 0).sum()) == 1


def test_nan_in_one_column_is_the_worst_of_its_row() -> None:
    """And 0/0 is not."""
    columns = len(trajectory.reference().steps.parameters[0])
    error = torch.zeros(trajectory.STEPS, columns, dtype=torch.float64)
    limit = torch.ones_like(error)
    error[5, 3], error[6, 2], limit[6, 1] = math.nan, 0.5, 0.0
    found, _ = trajectory_limits.worst_by_row("gradient", error, limit)
    by_step = list(found.values())
    assert math.isnan(by_step[5])
    assert by_step[6] == 0.5


# ---- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e-3, 0.1, 3.0])
def test_kl_divergence_is_exact_for_errors_of_any_size(size: float) -> None:
    logits, error = gaussian(9, seed=1), gaussian(9, seed=2) * size
    with mpmath.workdps(50):
        p = [mpmath.exp(value) for value in logits.tolist()]
        q = [a * mpmath.exp(e) for a, e in zip(p, error.tolist(), strict=True)]
        p, q = ([value / sum(row) for value in row] for row in (p, q))
        want = float(sum(a * mpmath.log(a / b) for a, b in zip(p, q, strict=True)))
    got = float(generation.kl_divergence(error, logits))
    assert got == pytest.approx(want, rel=1e-9)


def generated(rows: list[list[int]], first: list[int], lengths: list[int]) -> Generated:
    return Generated(torch.tensor(rows), torch.tensor(first), torch.tensor(lengths))


def logits_choosing(tokens: list[list[int]], gap: float) -> Tensor:
    """Logits (1, T, 257) that choose the given tokens, the second best behind by ``gap``."""
    best, second = tokens
    logits = torch.zeros(1, len(best), END + 1, dtype=torch.float64)
    for place, (a, b) in enumerate(zip(best, second, strict=True)):
        logits[0, place, b] = 10.0 - gap
        logits[0, place, a] = 10.0
    return logits


@pytest.mark.parametrize(
    ("second", "limit", "expected"),
    [
        ([98, 98, 98, 98], 0.5, (3, 3)),  # no tie: the truth's own length
        ([98, 98, 98, 98], 2.0, (2, 4)),  # may go its own way at once, and then end
        ([END, 98, 98, 98], 2.0, (1, 4)),  # may end at once
        ([SPACE, 98, 98, 98], 2.0, (2, 4)),  # a space is the first of three words
    ],
)
def test_length_range_opens_at_the_first_tie(
    second: list[int], limit: float, expected: tuple[int, int]
) -> None:
    truth = generated([[END, 97, 97, END]], [0], [3])
    logits = logits_choosing([[97, 97, END, 97], second], gap=1.0)
    shortest, longest = generation.length_range(truth, logits, torch.full((1, 4), limit))
    assert (int(shortest), int(longest)) == expected


def test_spread_limit_holds_for_lengths_that_move() -> None:
    lengths, moves = gaussian(100).abs() * 9, gaussian(100, seed=4)
    moved = (lengths + moves).std(correction=0) - lengths.std(correction=0)
    assert abs(float(moved)) <= generation.spread_limit(moves.abs())


def test_generation_ends_with_the_word_the_token_or_the_context() -> None:
    config = replace(trajectory.CONFIG, length=32)
    model = build(config, REFERENCE, CPU)
    found = generation.generate(model, config, CPU)
    for row, first, length in zip(found.tokens, found.first, found.lengths, strict=True):
        new = row[first + 1 : first + 1 + length].tolist()
        ends = new[-1:] == [END] or new.count(SPACE) == generation.WORDS
        assert ends or first + length == config.length
        assert END not in new[:-1]
    assert torch.equal(found.decisions.sum(1), found.lengths)
