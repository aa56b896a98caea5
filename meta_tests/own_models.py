"""Small models for ``--model``: a sound one, and the same with one defect each.

Each factory is named after its defect; ``sound`` and ``all_kinds`` have none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fixtures.distributed.sharding import fully_shard
from fixtures.own_model.factory import UserModel

WIDTH, TOKENS = 12, 11

# --- parts that are wrong -----------------------------------------------------------------------


class WrongBackward(Function):
    """tanh, its derivative 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 1.01 * (1.0 - y * y) * gradients[0]


class TanhFormBackward(Function):
    """The erf form of GELU, with the derivative of the tanh form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(gradients[0], x, approximate="tanh")


class SixteenBitSum(Function):
    """A mean over rows, added up in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.bfloat16().sum(0).to(x.dtype) / x.shape[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return (gradients[0] / ctx.shape[0]).expand(ctx.shape)


def unseeded_dropout(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    return x * (torch.rand(x.shape, generator=generator) > 0.1)


def half_detached(x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * x.detach()


class ForgetfulSGD(torch.optim.SGD):
    """Loads no momentum."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class SixteenBitSGD(torch.optim.SGD):
    """Updates rounded to bf16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                update = self.param_groups[0]["lr"] * parameter.grad
                parameter.sub_(update.bfloat16().to(parameter.dtype))


# --- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(activation) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class ForgetfulCheckpoint(Model):
    """Recomputes with other random numbers than those of the forward pass."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return y


class AlwaysDrops(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), 0.1)
        return self.head(self.blocks[1](self.blocks[0](x)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def rows_added_in_sixteen_bits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    mean: Tensor = SixteenBitSum.apply(losses)
    return mean


def valid(batch: tuple[Tensor, Tensor]) -> float:
    return float((batch[1] != -100).sum())


def batches() -> list[tuple[Tensor, Tensor]]:
    """Unequal numbers of valid targets."""
    made = []
    for missing in range(4):
        tokens, targets = torch.randint(TOKENS, (2, 2, 9))
        made.append((tokens, targets.flatten().index_fill(0, torch.arange(missing), -100)))
    return made


def user(model: nn.Module, **changed: Any) -> UserModel:
    return UserModel(model, **{"loss": loss, "batches": batches(), "valid": valid, **changed})


# --- factories ----------------------------------------------------------------------------------


def sound() -> UserModel:
    return user(Model())


def wrong_backward() -> UserModel:
    return user(Model(WrongBackward.apply))


def tanh_form_backward() -> UserModel:
    return user(Model(TanhFormBackward.apply))


def sixteen_bit_sum() -> UserModel:
    return user(Model(), loss=rows_added_in_sixteen_bits, valid=None)


def unseeded() -> UserModel:
    return user(Model(unseeded_dropout))


def always_drops() -> UserModel:
    return user(AlwaysDrops())


def forgetful_checkpoint() -> UserModel:
    return user(ForgetfulCheckpoint())


def detached() -> UserModel:
    return user(Model(half_detached))


def uncounted_targets() -> UserModel:
    return user(Model(), valid=None)


def forgets_momentum() -> UserModel:
    return user(Model(), optimizer=functools.partial(ForgetfulSGD, lr=0.1, momentum=0.9))


def sixteen_bit_update() -> UserModel:
    return user(Model(), optimizer=functools.partial(SixteenBitSGD, lr=0.1))


def other_each_time() -> UserModel:
    torch.seed()
    return user(Model())


def sum_over_ranks() -> UserModel:
    """Gradients multiplied by the number of ranks, of which fully_shard then takes the mean."""

    def wrap(model: nn.Module) -> None:
        ranks = torch.distributed.get_world_size()

        def multiply(module: nn.Module, args: Any, logits: Tensor) -> None:
            logits.register_hook(lambda gradient: gradient * ranks)

        model.register_forward_hook(multiply)
        fully_shard(model)

    return user(Model(), wrap=wrap)


def detached_when_sharded() -> UserModel:
    def wrap(model: nn.Module) -> None:
        model.blocks[0].register_forward_hook(lambda m, args, result: half_detached(result))
        fully_shard(model)

    return user(Model(), wrap=wrap)


# --- other architectures ------------------------------------------------------------------------


class AllKinds(nn.Module):
    """Convolution, batch norm, pooling, recurrence, attention, a buffer, a cast, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(9.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + torch.sin(self.positions.float())[:, None]
        x = F.relu(self.norm(self.convolution(x.mT))).mT
        x = x + self.recurrent(x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        pooled = x.float().std(1, keepdim=True).to(x.dtype)
        return self.head(x * pooled + F.silu(x).cumsum(1))


def all_kinds() -> UserModel:
    return user(AllKinds(), optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))


class Rotary(nn.Module):
    """Rotary positions by a complex buffer, as Llama's own code has them; and one in float64."""

    freqs: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        angles = torch.outer(torch.arange(16.0), 0.1 ** torch.arange(WIDTH // 2))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("shift", torch.ones((), dtype=torch.float64) / 3.0)

    def forward(self, tokens: Tensor) -> Tensor:
        pairs = self.embedding(tokens).unflatten(-1, (-1, 2)).contiguous()
        turned = torch.view_as_complex(pairs) * self.freqs[: tokens.shape[1]]
        return self.head(torch.view_as_real(turned).flatten(-2) + self.shift)


def rotary() -> UserModel:
    return user(Rotary())


def another_model() -> UserModel:
    remembered = Model()
    return user(remembered, loss=lambda model, batch: loss(remembered, batch))


def sixteen_bit_parameters() -> UserModel:
    return user(Rotary().bfloat16())


# --- what cannot be checked ---------------------------------------------------------------------


class Opaque(nn.Module):
    """Keeps a float32 result whatever it gets, in a kernel that no mode sees into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.ops.precision_meta.single(x))


@torch.library.custom_op("precision_meta::single", mutates_args=())
def single(x: Tensor) -> Tensor:
    return x.float() * 2.0


def mean_output(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def opaque() -> tuple[Any, ...]:
    return Opaque(), mean_output, [torch.randn(3, WIDTH)]


def vector_loss() -> tuple[Any, ...]:
    return nn.Linear(WIDTH, 2), lambda model, batch: model(batch), [torch.randn(3, WIDTH)]


def without_gradient() -> tuple[Any, ...]:
    return nn.Linear(WIDTH, 2), lambda m, b: m(b).detach().sum(), [torch.randn(3, WIDTH)]


def without_parameters() -> tuple[Any, ...]:
    return nn.ReLU(), mean_output, [torch.randn(3, WIDTH)]


def two_things() -> tuple[Any, ...]:
    return nn.Linear(1, 1), mean_output


def no_batches() -> tuple[Any, ...]:
    return nn.Linear(1, 1), mean_output, []


def raises() -> None:
    raise RuntimeError("no data here")


def misspelt() -> UserModel:
    return user(Model(), deliberate=("stops gradient",))
