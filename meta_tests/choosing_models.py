"""Sound models for ``--model`` whose choices look like defects, and the defects beside them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from fixtures.own_model.factory import UserModel

WIDTH = 6

# --- losses over more than one example ----------------------------------------------------------


def info_nce(gather: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[..., Tensor]:
    """Each row's partner among all rows."""

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (gather(F.normalize(model(x), dim=-1)) for x in pair)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    return loss


def over_all_ranks(x: Tensor) -> Tensor:
    return torch.cat(all_gather(x)) if dist.is_initialized() else x


def over_all_ranks_with_its_own_gradient_alone(x: Tensor) -> Tensor:
    """The factor of the world size is lost."""
    if not dist.is_initialized():
        return x
    rows = all_gather(x)
    return torch.cat([x if r == dist.get_rank() else y.detach() for r, y in enumerate(rows)])


def contrastive(**changed: Any) -> UserModel:
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 8))
    pairs = [(torch.randn(3, WIDTH), torch.randn(3, WIDTH)) for _ in range(4)]
    return UserModel(model, **{"loss": info_nce(), "batches": pairs, **changed})


def declared() -> UserModel:
    return contrastive(deliberate=("couples examples",))


def gathered() -> UserModel:
    return contrastive(loss=info_nce(over_all_ranks))


def lost_factor() -> UserModel:
    return contrastive(loss=info_nce(over_all_ranks_with_its_own_gradient_alone))


# --- blocks that are more than a function of tensors --------------------------------------------


class Cache:
    """What a block has computed so far; grows with each call."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def grown_by(self, x: Tensor) -> Tensor:
        self.rows.append(x)
        return torch.cat(self.rows)


class Caching(nn.Module):
    """A block that attends to its own input and whatever the cache holds: nothing, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.grown_by(self.linear(x))
        return x + F.softmax(x @ keys.T, dim=-1) @ keys


class Stack(nn.Module):
    """Two blocks, each with a cache that lives as long as a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, Cache())
        return x


class Remembering(Caching):
    """Keeps its cache in an attribute, where nobody can put it back."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return super().forward(x, self.cache)


class Remembers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.cache = Cache()
        return super().forward(x)


class Drifting(nn.Module):
    """A block whose scale grows with each call, as spectral norm's singular vectors turn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1.0
        return x + self.linear(x).tanh() * (1.0 + 0.1 * self.calls)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class CallsParts(nn.Module):
    """Calls a block's parts itself, past the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(x)))
        return x


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def user(model: nn.Module, loss: Callable[..., Tensor] = mean_square) -> UserModel:
    return UserModel(model, loss, [torch.randn(5, WIDTH) for _ in range(4)])


def caching() -> UserModel:
    return user(Stack())


def remembering() -> UserModel:
    return user(Remembers())


def drifting() -> UserModel:
    return user(nn.Sequential(Drifting(), Drifting()))


def with_a_workspace() -> UserModel:
    if (found := os.environ["CUBLAS_WORKSPACE_CONFIG"]) != ":4096:8":
        raise ValueError(repr(found))
    return caching()


def calls_parts() -> UserModel:
    return user(CallsParts())


def reads_an_attribute() -> UserModel:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) + model.blocks[0].linear.weight.square().mean()

    return user(Stack(), loss)


def zero_head() -> UserModel:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    nn.init.zeros_(model[2].weight)
    return user(model, lambda model, x: (model(x) - x).square().mean())


class Scaled(nn.Module):
    """A branch behind a scale of 1e-6: its fp16 gradients are subnormal, and they are right."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x)))


def layer_scale() -> UserModel:
    return user(nn.Sequential(Scaled(), Scaled(), nn.Linear(WIDTH, WIDTH)))
