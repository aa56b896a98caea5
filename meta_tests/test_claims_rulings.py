"""A statement's ruling follows from what its measurement sees: seen otherwise, it is another."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixtures.claims import (
    accumulation,
    attention,
    collectives,
    gelu,
    loss,
    scaler,
    seeds,
    sharding,
)
from fixtures.claims.claim import Claim
from fixtures.claims.ledger import CLAIMS

patched = mock.patch.object
BY_NUMBER = {claim.number: claim for claim in CLAIMS}

gradient, errors, cross_entropy, attend = (
    gelu.gradient,
    gelu.errors,
    F.cross_entropy,
    F.scaled_dot_product_attention,
)


def ones(parameter: Tensor, **_: Any) -> None:
    parameter.data.fill_(1.0)


def growing(x: Tensor, _: Any) -> Tensor:
    return torch.full((4,), 1e-3 * math.exp(min(float(x.max()), 2000) / 8), dtype=torch.float64)


OTHERWISE: dict[int, AbstractContextManager[Any]] = {
    1: patched(scaler, "_SCALE", 49152.0),
    6: patched(attention, "outputs", lambda *_: ["a", "b"]),
    7: patched(attention, "FLASH", attention.MATH),
    8: patched(
        F,
        "scaled_dot_product_attention",
        lambda q, *rest, **options: attend(q, *rest, **options) * (1 + 1e-6 * len(q)),
    ),
    12: patched(accumulation, "alike_weights", accumulation.by_share),
    14: patched(sharding, "changed_by", lambda *_: 1),
    19: patched(gelu, "gradient", lambda x, form="none": gradient(x, form) + 0.012),
    20: patched(gelu, "gradient", lambda x, form="none": gradient(x, form) + 1.8e-7),
    21: patched(gelu, "gradient", lambda x, form="none": gradient(x, form).round()),
    22: patched(gelu, "errors", lambda fmt: 2 * errors(fmt)),
    29: patched(scaler, "unscaled", lambda gradients, scale: gradients / torch.tensor(scale)),
    30: patched(scaler, "_SCALE", 65535.0),
    32: patched(scaler, "_SCALE", 49152.0),
    33: patched(scaler, "_SCALE", 1.0),
    40: patched(loss, "all_in", lambda fmt, x: loss.per_row(x)),
    41: patched(loss, "errors", lambda *_: torch.full((4,), 1e-5)),
    42: patched(loss, "errors", growing),
    44: patched(F, "cross_entropy", lambda x, targets: cross_entropy(x.float(), targets)),
    46: patched(loss, "validated", lambda function: function),
    48: patched(seeds, "outputs", lambda _, environs: ["1 1"] * len(environs)),
    50: patched(nn.init, "kaiming_uniform_", ones),
    51: patched(seeds, "outputs", lambda *_: ["a", "b"]),
    52: patched(seeds, "outputs", lambda *_: ['{"randn-1000": "a"}'] * 3),
    101: patched(accumulation, "by_share", lambda sizes: [1.0] * len(sizes)),
}


@pytest.mark.parametrize("number", OTHERWISE)
def test_in_one_process(number: int) -> None:
    claim = BY_NUMBER[number]
    assert claim.measure
    with OTHERWISE[number]:
        assert claim.measure().ruling is not claim.ruling


def gathered(dtype: torch.dtype) -> sharding.Gathered:
    gradients = {name: torch.ones_like(p) for name, p in sharding.model().named_parameters()}
    return sharding.Gathered(dtype, True, torch.float32, gradients)


def late(_: Any, world: int, rank: int, waits: bool) -> list[Any]:
    return [(torch.tensor(-1.0 if waits else float(rank)), 0.1)] * world


def half_summed(job: Callable[..., Any], world: int, *_: Any) -> list[Any]:
    if job is collectives.read_early:
        return [(1, 0, 0)] * world
    return [(torch.ones(2), 0)] * world


ANSWERS: dict[int, Callable[..., list[Any]]] = {
    9: lambda _, world, *rest: [False] * world,
    10: lambda _, world, *rest: [torch.ones(4)] * world,
    15: lambda _, world, kind: [{"ddp": 1.0, "fully_shard": 0.1}[kind]] * world,
    17: lambda _, world, *rest: [gathered(torch.bfloat16)] * world,
    18: lambda _, world: [(torch.float16, torch.float32)] * world,
    35: half_summed,
    36: late,
    89: lambda _, world, *rest: [[]] * world,
    90: lambda _, world, *rest: [60000.0] * world,
}


@pytest.mark.parametrize("number", ANSWERS)
def test_over_ranks(number: int) -> None:
    claim: Claim = BY_NUMBER[number]
    assert claim.over_ranks
    assert claim.over_ranks(ANSWERS[number]).ruling is not claim.ruling
