"""Small models for ``--model`` whose kernels lose more than a unit of their result."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, ROWS = 64, 4096


class Matrix(nn.Module):
    """Rows through a function of a square matrix."""

    def __init__(self, function: Any, diagonal: float) -> None:
        super().__init__()
        start = torch.randn(SIZE, SIZE) / SIZE**0.5 + diagonal * torch.eye(SIZE)
        self.weight, self.function = nn.Parameter(start), function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x @ self.function(self.weight)
        return result


def of_matrix(function: Any, diagonal: float = 0.0) -> tuple[Any, ...]:
    batches = [torch.randn(4, SIZE) for _ in range(4)]
    return Matrix(function, diagonal), lambda model, x: model(x).square().mean(), batches


def inverse() -> tuple[Any, ...]:
    return of_matrix(torch.linalg.inv)


def solve() -> tuple[Any, ...]:
    return of_matrix(lambda w: torch.linalg.solve(w, torch.eye(SIZE)))


def logdet() -> tuple[Any, ...]:
    return of_matrix(lambda w: torch.linalg.slogdet(w).logabsdet + torch.eye(SIZE))


def eigenvalues() -> tuple[Any, ...]:
    return of_matrix(lambda w: torch.linalg.eigvalsh(w + w.T).diag())


def orthogonal() -> tuple[Any, ...]:
    return of_matrix(lambda w: torch.linalg.qr(w)[0])


def gaussian_process() -> tuple[Any, ...]:
    """Factors of a matrix that is nearly singular, and a solve with them."""

    def whitened(w: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(w @ w.T + 1e-3 * torch.eye(SIZE))
        return torch.linalg.solve_triangular(factor, torch.eye(SIZE), upper=False)

    return of_matrix(whitened)


def inverse_in_ten_bits() -> tuple[Any, ...]:
    return of_matrix(lambda w: torch.linalg.inv(w + (w.half().float() - w).detach()))


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(ROWS, 8, mode=mode), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids.flatten(), torch.tensor([0, 100, ids.numel() // 2])))


def of_bags(mode: str) -> tuple[Any, ...]:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) / (1.0 if mode == "mean" else 99.0), batch[1])

    batches = [(torch.randint(ROWS, (4096,)), torch.randint(3, (3,))) for _ in range(4)]
    return Bags(mode), loss, batches


def mean_bags() -> tuple[Any, ...]:
    return of_bags("mean")


def sum_bags() -> tuple[Any, ...]:
    return of_bags("sum")
