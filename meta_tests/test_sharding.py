"""Sharded gradients are the average over the ranks, gathered whole, in every mix of dtypes.

All numbers are small integers: every sum is exact in every format and order, so got equals want.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fixtures.distributed import sharding
from fixtures.distributed.pool import RankPool, RanksUnavailable
from fixtures.distributed.ranks import Rank
from fixtures.distributed.sharding import full_gradients, full_parameters, shard

SAMPLES = 12  # an equal share for 2, 3 and 4 ranks
HIDDEN = 257  # rows: no world size divides them

Gradients = dict[str, torch.Tensor]


def integers(shape: tuple[int, ...], seed: int, largest: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).double()


def make_model(dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(tuple(parameter.shape), seed))
    return model


def loss(model: nn.Module, samples: slice, dtype: torch.dtype, largest: int = 1) -> torch.Tensor:
    """Linear in the output: the gradient holds sums of integers."""
    inputs = integers((SAMPLES, 5), 10, largest).to(dtype)
    signs = integers((SAMPLES, 1), 11).to(dtype)
    return (model(inputs[samples]) * signs[samples]).sum()


def gradients_of_all(dtype: torch.dtype, largest: int = 1) -> Gradients:
    model = make_model(dtype)
    loss(model, slice(None), dtype, largest).backward()
    return full_gradients(model)


def sharded(
    rank: Rank,
    dtype: torch.dtype,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    largest: int = 1,
) -> tuple[Gradients, Gradients]:
    """Gradients, parameters. Each rank's loss counts world_size times: the average is the sum."""
    model = make_model(dtype)
    shard(model, blocks=[model[0]], rank=rank, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    share = SAMPLES // rank.world_size
    samples = slice(rank.index * share, (rank.index + 1) * share)
    (rank.world_size * loss(model, samples, param_dtype or dtype, largest)).backward()
    return full_gradients(model), full_parameters(model)


def refused(rank: Rank) -> None:
    def fully_shard(module: nn.Module, **_: object) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    with mock.patch.object(sharding, "fully_shard", fully_shard):
        shard(make_model(torch.float32), blocks=[], rank=rank)


@contextlib.contextmanager
def summed(_: None) -> Iterator[None]:
    """Reduce-scatter gives the sum where the average was asked for."""
    # The newer of the two names that fully_shard has called it by.
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))
    original = getattr(dist, name)

    def sum_only(*args: object, op: object, **kwargs: object) -> object:
        return original(*args, op=dist.ReduceOp.SUM, **kwargs)

    with mock.patch.object(dist, name, sum_only):
        yield


def local_rows(rank: Rank) -> int:
    model = make_model(torch.float32)
    shard(model, blocks=[model[0]], rank=rank)
    return model[0].weight.to_local().shape[0]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(preload=[__name__]) as pool:
        yield pool


def equal(got: Gradients, want: Gradients) -> bool:
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want
    )


MIXES = [
    pytest.param(torch.float64, None, None, id="fp64"),
    pytest.param(torch.float32, None, None, id="fp32"),
    pytest.param(torch.float32, None, torch.bfloat16, id="reduce-bf16"),
    pytest.param(torch.float32, torch.bfloat16, torch.float32, id="compute-bf16-reduce-fp32"),
    pytest.param(torch.float64, None, torch.float32, id="fp64-reduce-fp32"),
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "param_dtype", "reduce_dtype"), MIXES)
def test_gradients_equal_one_process(
    pool: RankPool,
    world_size: int,
    dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> None:
    results = pool.run(sharded, world_size, dtype, param_dtype, reduce_dtype)
    for gradients, parameters in results:
        assert equal(gradients, gradients_of_all(dtype))
        assert equal(parameters, full_parameters(make_model(dtype)))


def test_reduction_really_runs_in_its_dtype(pool: RankPool) -> None:
    largest = 2**10  # sums no longer fit the 8 bits of bfloat16
    want = gradients_of_all(torch.float32, largest)
    for reduce_dtype, exact in ((torch.float32, True), (torch.bfloat16, False)):
        gradients, _ = pool.run(sharded, 2, torch.float32, None, reduce_dtype, largest)[0]
        assert equal(gradients, want) == exact


def test_a_sum_for_the_average_is_seen(pool: RankPool) -> None:
    pool.context = (f"{__name__}:summed", None)
    try:
        gradients, _ = pool.run(sharded, 2, torch.float32)[0]
    finally:
        pool.context = None
    want = gradients_of_all(torch.float32)
    assert equal(gradients, {name: 2 * gradient for name, gradient in want.items()})


def test_rows_are_shared_unevenly(pool: RankPool) -> None:
    assert pool.run(local_rows, 4) == [65, 65, 65, 62]
    assert pool.run(local_rows, 3) == [86, 86, 85]


def test_refusal_carries_the_words_of_torch(pool: RankPool) -> None:
    with pytest.raises(RanksUnavailable, match=r"refuses fully_shard on cpu: ProcessGroupGloo"):
        pool.run(refused, 2)
