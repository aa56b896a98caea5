"""Sums over ranks: are they formed in the order of the model?

On the CPU gloo is held to its ring, bit for bit: which rank begins which chunk, every rounding of a
16-bit partial sum, tensors of one element, of less than a chunk, and of more than a segment. On
GPUs NCCL chooses algorithm, protocol, channels and the order of its rings by what it finds: which
of the modelled sums it formed is recorded, and that all ranks hold the same one is held.

What goes wrong: a chunk that begins at another rank, a partial sum kept in another format, another
algorithm after an upgrade; the gradients of a step move, run by run or release by release.

Mechanism, sources and what is unverified: docs/collectives.md.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed.ranks import Rank, RunRanks
from fixtures.hardware_models import collectives, nccl
from fixtures.hardware_models.collectives import Segment, SumTree
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from fixtures.unjudged import Unjudged

formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
world_sizes = pytest.mark.parametrize("world_size", [2, 3, 4], ids=lambda w: f"w{w}")
SMALL = (1, 5, 61, 1000, 70_001)
LARGE = 2_200_000  # of fp32: for four ranks more than a segment of 1 MiB in each half of a chunk


def value_of(rank: int, fmt: Format, count: int) -> Tensor:
    """Of both signs, up to 2^7 apart: most of their sums round."""
    raw = np.random.Philox(key=[count, rank]).random_raw(count)
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    scale = 2.0 ** (raw & np.uint64(7)).astype(np.float64)
    return torch.from_numpy(unit * scale).to(fmt.dtype)


# --- what the ranks do --------------------------------------------------------------------------


def summed(rank: Rank, fmt: Format, count: int) -> tuple[str, Tensor | None]:
    """The digest of what each rank holds afterwards, and that of rank 0 itself."""
    mine = value_of(rank.index, fmt, count).to(rank.device)
    dist.all_reduce(mine)
    found = mine.cpu()
    digest = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
    return digest, None if rank.index else found


def scattered(rank: Rank, fmt: Format, count: int) -> Tensor:
    mine = value_of(rank.index, fmt, count).to(rank.device)
    share = mine.new_empty(count // rank.world_size)
    dist.reduce_scatter_tensor(share, mine)
    return share.cpu()


# --- the sums that NCCL may form ----------------------------------------------------------------

CHANNELS = (1, 2, 4, 8, 12, 16, 24, 32)
PROTOCOLS: tuple[nccl.Protocol, ...] = ("simple", "ll", "ll128")


def rings_of(world_size: int) -> list[tuple[int, ...]]:
    """All rings of up to four ranks, else up and down; NCCL counts positions from rank 0."""
    if world_size <= 4:
        return [(0, *rest) for rest in itertools.permutations(range(1, world_size))]
    return [tuple(range(world_size)), (0, *range(world_size - 1, 0, -1))]


def schedules(world_size: int, count: int, itemsize: int) -> Iterator[tuple[str, list[Segment]]]:
    found = torch.cuda.nccl.version()[:2]
    ruled = any(rules.first <= found <= rules.last for rules in nccl.TABLE)
    version = found if ruled else nccl.TABLE[-1].last
    for ring in rings_of(world_size):
        chain = [Segment(0, count, collectives.chain(ring))]
        yield f"tree, chain {ring}", chain
        for protocol, channels in itertools.product(PROTOCOLS, CHANNELS):
            schedule = nccl.ring(
                count, itemsize, [ring] * channels, protocol=protocol, version=version
            )
            yield f"ring {ring}, {protocol}, {channels} channels", schedule


def matching(values: list[Tensor], got: Tensor) -> list[str]:
    """The modelled all-reduces with these very bits, equal schedules by their first name."""
    world_size, count = len(values), got.numel()
    seen: dict[tuple[Segment, ...], str] = {}
    for name, schedule in schedules(world_size, count, got.element_size()):
        seen.setdefault(tuple(schedule), name)
    found = [
        name
        for schedule, name in seen.items()
        if torch.equal(collectives.all_reduce(values, schedule), got)
    ]
    nvls = torch.equal(collectives.nvls_all_reduce(values), got)
    return sorted(found + (["nvls, ranks in order"] if nvls else []))


def check_all_reduce(
    check: Check, ranks: RunRanks, device: Device, fmt: Format, world_size: int, count: int
) -> None:
    values = [value_of(rank, fmt, count) for rank in range(world_size)]
    results = ranks(summed, world_size, fmt, count)
    check.exact([digest == results[0][0] for digest, _ in results], [True] * world_size)
    got = results[0][1]
    if device.type == "cpu":
        schedule = collectives.gloo_ring(count, fmt.dtype.itemsize, world_size)
        check.exact(got, collectives.all_reduce(values, schedule), name="gloo")
    else:
        observe_order(check, matching(values, got))


def check_reduce_scatter(
    check: Check, ranks: RunRanks, device: Device, fmt: Format, world_size: int, count: int
) -> None:
    values = [value_of(rank, fmt, count * world_size) for rank in range(world_size)]
    got = torch.cat(ranks(scattered, world_size, fmt, count * world_size))
    if device.type == "cpu":  # gloo reduces the whole and keeps a share
        schedule = collectives.gloo_ring(got.numel(), fmt.dtype.itemsize, world_size)
        check.exact(got, collectives.all_reduce(values, schedule), name="gloo")
        return
    candidates: dict[str, list[SumTree]] = {
        f"ring {ring}": collectives.ring_shares(ring) for ring in rings_of(world_size)
    }
    found = [
        name
        for name, trees in candidates.items()
        if torch.equal(torch.cat(collectives.reduce_scatter(values, trees)), got)
    ]
    nvls = torch.equal(collectives.nvls_all_reduce(values), got)
    observe_order(check, found + (["nvls, ranks in order"] if nvls else []))


def observe_order(check: Check, found: list[str]) -> None:
    """Which of NCCL's sums has these bits; if none has, the models say nothing of this device."""
    check.observe(found, name="nccl")
    if not found:
        raise Unjudged("no modelled sum has the bits of NCCL's: its order here is unknown")


@pytest.mark.models
class TestCollectives:
    @formats
    @world_sizes
    @pytest.mark.parametrize("count", SMALL)
    def test_all_reduce(
        self,
        check: Check,
        ranks: RunRanks,
        device: Device,
        fmt: Format,
        world_size: int,
        count: int,
    ) -> None:
        check_all_reduce(check, ranks, device, fmt, world_size, count)

    @world_sizes
    def test_all_reduce_in_many_segments(
        self, check: Check, ranks: RunRanks, device: Device, world_size: int
    ) -> None:
        check_all_reduce(check, ranks, device, FP32, world_size, LARGE)

    @formats
    @world_sizes
    @pytest.mark.parametrize("count", [1, 61, 70_001])
    def test_reduce_scatter(
        self,
        check: Check,
        ranks: RunRanks,
        device: Device,
        fmt: Format,
        world_size: int,
        count: int,
    ) -> None:
        check_reduce_scatter(check, ranks, device, fmt, world_size, count)


@pytest.mark.gpu_only
@pytest.mark.parametrize("world_size", [5, 6, 7, 8], ids=lambda w: f"w{w}")
class TestMoreRanks:
    @formats
    @pytest.mark.parametrize("count", [1000, 70_001, LARGE])
    def test_all_reduce(
        self,
        check: Check,
        ranks: RunRanks,
        device: Device,
        fmt: Format,
        world_size: int,
        count: int,
    ) -> None:
        check_all_reduce(check, ranks, device, fmt, world_size, count)

    @formats
    def test_reduce_scatter(
        self, check: Check, ranks: RunRanks, device: Device, fmt: Format, world_size: int
    ) -> None:
        check_reduce_scatter(check, ranks, device, fmt, world_size, 70_001)
