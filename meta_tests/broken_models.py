"""Models for ``--model`` that are wrong as programs: each factory is named after what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], list[Any]]


def made(
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, Any], Any] = lambda model, x: model(x).square().mean(),
    batches: list[Any] | None = None,
) -> Made:
    """A linear map of three numbers to two, but for what a factory replaces."""
    return model or nn.Linear(3, 2), loss, batches or [torch.randn(4, 3) for _ in range(4)]


def vector_loss() -> Made:
    return made(loss=lambda model, x: model(x))


def detached_loss() -> Made:
    return made(loss=lambda model, x: model(x).mean().detach())


def zero_loss() -> Made:
    return made(loss=lambda model, x: 0.0 * model(x).mean())


def nan_weight() -> Made:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 1] = torch.nan
    return made(model)


def nan_loss() -> Made:
    return made(loss=lambda model, x: (-1.0 - model(x).square().mean()).log())


def sparse_gradient() -> Made:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    return made(model, batches=[torch.randint(5, (4,)) for _ in range(4)])


def leaves_in_the_factory() -> Made:
    sys.exit("usage: train.py --data DIR")


def leaves_in_the_loss() -> Made:
    return made(loss=lambda model, x: sys.exit("no tokens left"))


def wrong_width() -> Made:
    return made(loss=lambda model, x: model(x[:, :2]).mean())
