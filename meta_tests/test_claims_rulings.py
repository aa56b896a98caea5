"""A statement's ruling follows from what its measurement sees: seen otherwise, it is another."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixtures.audit.fixed import Limits
from fixtures.claims import (
    accumulation,
    attention,
    collectives,
    data,
    dropout,
    fingerprint,
    gelu,
    hardening,
    layer_norm,
    loss,
    protocol,
    recompute,
    scaler,
    seeds,
    sharding,
    updates,
)
from fixtures.claims.claim import Claim
from fixtures.claims.ledger import CLAIMS
from fixtures.hardening.computations import Seen

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


checkpointed = recompute.gradient
STEADY = protocol.Healthy(torch.ones(3, 2), torch.ones(4, 2), torch.ones(60), None)
UNMOVED = dict.fromkeys(("", "oneDNN off", "2 threads"), Seen({"sum": "a"}, {}, 1, ()))


def a_hook_that_clips(gradient: Any, *_: Any, error_if_nonfinite: bool = False, **__: Any) -> Any:
    """clip_grad_norm_, if it took what a hook gets."""
    if isinstance(gradient, Tensor) and error_if_nonfinite and not gradient.isfinite().all():
        raise RuntimeError("not finite")
    return gradient


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
    22: patched(gelu, "gradient", lambda x, *form: 2 * gradient(x, *form)),
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
    3: patched(protocol, "NODES", protocol.NODES[:5]),
    11: patched(updates, "noisy_over_clean", lambda *_, **__: dict.fromkeys((100, 300, 600), 17.0)),
    24: patched(fingerprint, "largest", lambda _: torch.zeros(120)),
    26: patched(fingerprint, "norms", lambda of: torch.stack([g.sum() for g in of.values()])),
    53: patched(recompute, "equal_bits", lambda: {"reentrant": False}),
    54: patched(
        recompute,
        "gradient",
        lambda *a, **k: checkpointed(*a, **k) * (1.0 if a[2] is None else 1.47),
    ),
    55: patched(
        recompute,
        "gradient",
        lambda *a, **k: checkpointed(*a, **k) + float(a[2] == recompute.MODES["reentrant"]),
    ),
    56: patched(recompute, "gradient_after_a_change", lambda _: 1.0),
    60: patched(hardening, "switched", lambda *_: UNMOVED),
    72: patched(torch.linalg, "matrix_rank", lambda _: 8),
    73: patched(protocol, "healthy", lambda *_: STEADY),
    74: patched(protocol, "healthy", lambda *_: STEADY),
    75: patched(torch, "isclose", lambda x, *_, **__: torch.ones_like(x, dtype=torch.bool)),
    76: patched(protocol, "healthy", lambda *_: STEADY),
    77: patched(dropout, "mask", lambda *_, threads=1, **__: torch.full((3,), threads)),
    78: patched(protocol, "Limits", partial(Limits, loss_deviation=0.01)),
    82: patched(layer_norm, "next_up", lambda _: torch.tensor(6.1e-5)),
    83: patched(layer_norm, "slope", lambda *_: math.inf),
    84: patched(layer_norm, "slope", lambda *_: 1.0),
    86: patched(torch, "finfo", lambda _: SimpleNamespace(tiny=6.1e-5)),
    87: patched(
        nn.utils.parametrizations,
        "weight_norm",
        lambda layer: nn.Sequential(layer, nn.LayerNorm(layer_norm.WIDTH)),
    ),
    88: patched(torch, "native_layer_norm", lambda *_: (None, torch.ones(1))),
    91: patched(nn.utils, "clip_grad_norm_", a_hook_that_clips),
    92: patched(data, "orders", lambda count: [data.permutation(n) for n in range(count)]),
    93: patched(data, "orders", lambda *_, **__: [torch.rand(data.COUNT)]),
    94: patched(data.DistributedSampler, "set_epoch", lambda *_: None),
    95: patched(data, "RandomSampler", lambda *_, **__: torch.rand(data.COUNT).tolist()),
    96: patched(data, "permutation", lambda seed: torch.arange(data.COUNT - seed)),
    98: patched(updates, "LinearLR", lambda opt, **_: opt.param_groups[0].update(lr=0.0)),
    99: patched(updates, "lost", lambda _: {"uniform": 0.5}),
    100: patched(updates, "trained", lambda warm_up, *_: (1.0 - warm_up / 1e4, 0.0)),
    101: patched(accumulation, "by_share", lambda sizes: [1.0] * len(sizes)),
}


UNTURNED = {
    *(2, 5),  # training runs on several paths
    *(13, 97),  # arithmetic on the figures that are stated, and numbers of a format
    *(27, 28, 31, 34, 43, 45, 47, 49, 66, 68, 69, 70, 71, 81, 85, 102),  # one call each
    *(63, 64, 67, 79, 80, 103),  # in processes of their own, which a patch does not reach
    *(16, 25, 39),
}
"""Statements whose conditions stand in one line, or that only another torch could turn."""


def test_a_new_statement_is_turned_or_says_why_not() -> None:
    tried = {claim.number for claim in CLAIMS if claim.measure or claim.over_ranks}
    assert tried == OTHERWISE.keys() | ANSWERS.keys() | UNTURNED


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
