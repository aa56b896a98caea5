"""Small models for ``--model`` that decide: routers, kinks, maxima; sound ones and wrong ones.

Of the sound ones each was red once, by no fault of its own; of the others each must be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fixtures.own_model.factory import UserModel

WIDTH, TOKENS, LENGTH, EXPERTS = 8, 11, 9, 4


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens() -> list[Tensor]:
    return [torch.randint(TOKENS, (2, LENGTH)) for _ in range(4)]


class Around(nn.Module):
    """Embedding, a layer, head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(TOKENS, WIDTH), layer
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.layer(x))


# --- casts and masks ----------------------------------------------------------------------------


class CastAndMask(nn.Module):
    """A norm that casts, to float32 even what is float32, before attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.qkv = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def cast_and_mask() -> tuple[Any, ...]:
    return Around(CastAndMask()), loss, tokens()


class LargestMask(CastAndMask):
    """The same with a mask of the format's own lowest number, added by hand."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.to(torch.float32)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        lowest = torch.full((LENGTH, LENGTH), torch.finfo(x.dtype).min, dtype=x.dtype)
        scores = q @ k.mT * (WIDTH / 2) ** -0.5 + lowest.triu(1)
        y = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def largest_mask() -> tuple[Any, ...]:
    return Around(LargestMask()), loss, tokens()


# --- experts ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """The two best of four experts, each with the rows that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.route(rows)
        result = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            y = F.silu(rows[row] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, row, (y * weights[row, place, None]).to(result.dtype))
        return result.view_as(x)


def experts() -> tuple[Any, ...]:
    return Around(Experts()), loss, tokens()


class Grouped(Experts):
    """The rows sorted by expert, counted in floating numbers, in one product of groups."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.route(rows)
        order = chosen.flatten().argsort()
        counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(rows[order // 2], self.up, offs=ends))
        y = torch._grouped_mm(h, self.down, offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // 2, y.to(rows.dtype)).view_as(x)


def grouped() -> tuple[Any, ...]:
    return Around(Grouped()), loss, tokens()


class RoundedRouter(Experts):
    """Routes by logits that were rounded to 8 bits, far from 0."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        chosen = (logits + 8.0).bfloat16().topk(2, dim=-1).indices
        return logits.softmax(-1, dtype=torch.float32).gather(-1, chosen), chosen


def rounded_router() -> tuple[Any, ...]:
    return Around(RoundedRouter()), loss, tokens()


# --- kinks --------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.conv, self.head = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, 5)
        self.activation, self.pool = activation, nn.MaxPool2d(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.norm(self.stem(x))))
        x = self.activation(self.conv(x))
        return self.head(x.amax((2, 3)) + x.clamp(-0.3, 0.3).abs().mean((2, 3)))


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, 10, 10), torch.randint(5, (4,))) for _ in range(4)]


def kinks() -> tuple[Any, ...]:
    return ConvNet(nn.ReLU(inplace=True)), image_loss, images()


def soft_kinks() -> tuple[Any, ...]:
    return ConvNet(lambda x: F.leaky_relu(F.hardswish(x)) + F.relu6(x)), image_loss, images()


class ShiftedMask(Function):
    """ReLU, whose gradient starts at 0.1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0] > 0.1)


def shifted_mask() -> tuple[Any, ...]:
    return ConvNet(ShiftedMask.apply), image_loss, images()


class RoundedMask(Function):
    """A threshold at 0.3, whose gradient looks at 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x - 0.3).relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0].bfloat16() > 0.3)


def rounded_mask() -> tuple[Any, ...]:
    return ConvNet(RoundedMask.apply), image_loss, images()


class Tie(nn.Module):
    """A ReLU at 1e-9, which is a difference of numbers near 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.7, -0.7], [0.7, 0.4]]))
            self.linear.bias.copy_(torch.tensor([1e-9, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


def tie() -> UserModel:
    return UserModel(Tie(), lambda m, x: m(x).square().sum() + m(x).sum(), [torch.ones(1, 2)])


# --- steps and maxima inside of kernels ---------------------------------------------------------


class Quantized(nn.Module):
    """Inputs and weights of 8 bits, with torch's own kernels for both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scales", torch.full((WIDTH,), 0.01))
        self.register_buffer("zeros", torch.zeros(WIDTH, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_channel_affine(
            self.linear.weight, self.scales, self.zeros, 0, -128, 127
        )
        y = F.linear(torch.fake_quantize_per_tensor_affine(x, 0.03, 0, -128, 127), weight)
        return torch.fake_quantize_per_tensor_affine(F.silu(y.float()), 0.03, 3, -128, 127)


def quantized() -> UserModel:
    return UserModel(Around(Quantized()), loss, tokens(), deliberate=("stops gradients",))


class Largest(nn.Module):
    """Each position takes the largest of what random others send it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("target", torch.randint(LENGTH, (1, LENGTH, 1)))

    def forward(self, x: Tensor) -> Tensor:
        sent = self.linear(x)
        target = self.target.expand_as(sent)
        return torch.zeros_like(sent).scatter_reduce(1, target, sent, "amax", include_self=False)


def largest() -> tuple[Any, ...]:
    return Around(Largest()), loss, tokens()


class Spline(nn.Module):
    """A line that is broken at edges which the layer itself computes, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.ModuleList(nn.Linear(WIDTH, 16 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.edges:
            sizes = layer(x).float().unflatten(-1, (2, WIDTH, 8)).softmax(-1)
            ends = F.pad(sizes.cumsum(-1), (1, 0))
            (left, bottom), (width, height) = ends.unbind(-3), sizes.unbind(-3)
            at = x.float().sigmoid()[..., None]
            bin = torch.searchsorted(left.contiguous(), at).sub(1).clamp(0, 7)
            slope = height.gather(-1, bin) / width.gather(-1, bin)
            x = 6.0 * (bottom.gather(-1, bin) + (at - left.gather(-1, bin)) * slope)[..., 0] - 3.0
        return x


def spline() -> tuple[Any, ...]:
    return Around(Spline()), loss, tokens()


def penalized() -> tuple[Any, ...]:
    """A loss that differentiates the model itself."""

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (slope.norm(dim=-1) - 1.0).square().mean()

    net = nn.Sequential(nn.Linear(3, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 4), nn.Tanh())
    return net, penalty, [torch.randn(6, 3) for _ in range(4)]
