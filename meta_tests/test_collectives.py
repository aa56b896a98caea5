"""The orders of sums over ranks, against simulations that pass messages between ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.hardware_models import collectives, nccl
from fixtures.hardware_models.collectives import Segment, SumTree
from fixtures.numerics.formats import FORMATS, Format, from_bits

formats = pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "fp64"])
world_sizes = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])


def values_of(name: str, ranks: int, count: int) -> list[Tensor]:
    """Values whose sums round differently in every order."""
    generator = torch.Generator().manual_seed(ranks * 1000 + count)
    drawn = torch.randn(ranks, count, generator=generator, dtype=torch.float64)
    scales = 2.0 ** torch.randint(-6, 7, (ranks, count), generator=generator)
    return list((drawn * scales).to(FORMATS[name].dtype))


# --- one addition, in rational arithmetic ---------------------------------------------------------


def rounded(value: Fraction, fmt: Format) -> Fraction:
    """To nearest even, no overflow; subnormals as IEEE 754 has them."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, fmt.emin)
    unit = Fraction(2) ** (exponent - fmt.precision + 1)
    return round(value / unit) * unit


def add(a: Fraction, b: Fraction, fmt: Format) -> Fraction:
    return rounded(a + b, fmt)


def exact(values: Sequence[Tensor]) -> list[list[Fraction]]:
    return [[Fraction(x) for x in value.double().tolist()] for value in values]


def back(numbers: Sequence[Fraction], fmt: Format) -> Tensor:
    return torch.tensor([float(x) for x in numbers], dtype=torch.float64).to(fmt.dtype)


@formats
def test_an_addition_is_rounded_once(name: str) -> None:
    """Subnormals, ties and neighbours of the largest number among them."""
    fmt = FORMATS[name]
    width = 8 * fmt.dtype.itemsize
    generator = torch.Generator().manual_seed(7)
    integer = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    patterns = torch.randint(0, 2 ** (width - 2), (2, 300), generator=generator).to(integer)
    a, b = (from_bits(p, fmt.dtype) for p in patterns)
    got = collectives.summed([a, -b], (0, 1))
    want = [add(x, y, fmt) for x, y in zip(exact([a])[0], exact([-b])[0], strict=True)]
    assert torch.equal(got, back(want, fmt))


# --- rings ----------------------------------------------------------------------------------------


def gloo_simulated(values: Sequence[Tensor], fmt: Format) -> Tensor:
    """gloo/allreduce.cc: rank r sends chunk r + 1 to rank r - 1 and adds what comes from r + 1, by
    segments; afterwards rank r holds chunk r."""
    ranks, count, size = len(values), values[0].numel(), fmt.dtype.itemsize
    buffers = exact(values)
    total = count * size
    segments = max((total + 2**20 - 1) // 2**20, 2 * ranks)
    while segments % ranks:
        segments += 1
    each = segments // ranks
    segment = (total + segments - 1) // segments
    while segment % size:
        segment += 1

    def elements(number: int) -> range:
        start = (number % segments) * segment // size
        return range(min(start, count), min(start + segment // size, count))

    for step in range(segments - each):
        sent = [
            [buffers[rank][i] for i in elements((rank + 1) * each + step)] for rank in range(ranks)
        ]
        for rank in range(ranks):
            received = sent[(rank + 1) % ranks]
            for i, partial_sum in zip(elements((rank + 2) * each + step), received, strict=True):
                buffers[rank][i] = add(buffers[rank][i], partial_sum, fmt)
    result = [Fraction(0)] * count
    for rank in range(ranks):
        for number in range(rank * each, (rank + 1) * each):
            for i in elements(number):
                result[i] = buffers[rank][i]
    return back(result, fmt)


@formats
@world_sizes
@pytest.mark.parametrize("count", [1, 13, 100])
def test_gloo_is_a_descending_ring(name: str, ranks: int, count: int) -> None:
    fmt, values = FORMATS[name], values_of(name, ranks, count)
    schedule = collectives.gloo_ring(count, fmt.dtype.itemsize, ranks)
    assert torch.equal(collectives.all_reduce(values, schedule), gloo_simulated(values, fmt))


def test_an_empty_tensor_has_an_empty_sum() -> None:
    empty = [torch.ones(0)] * 3
    for schedule in (collectives.gloo_ring(0, 4, 3), nccl.ring(0, 4, [range(3)] * 8)):
        assert collectives.all_reduce(empty, schedule).shape == (0,)


def test_gloo_splits_long_tensors_into_more_segments() -> None:
    """3 ranks, 4 M floats: 16 MiB are 18 segments of 932,068 bytes, 6 to a chunk."""
    schedule = collectives.gloo_ring(4 * 2**20, 4, 3)
    assert [segment.stop for segment in schedule] == [1398102, 2796204, 4 * 2**20]
    assert [segment.tree for segment in schedule] == [(2, 1, 0), (0, 2, 1), (1, 0, 2)]


def nccl_ring_simulated(
    values: Sequence[Tensor], fmt: Format, order: Sequence[int], chunk: int
) -> Tensor:
    """runRing of src/device/all_reduce.h, one channel: every rank's steps, in lockstep."""
    ranks, count = len(values), values[0].numel()
    numbers = exact(values)
    result = [Fraction(0)] * count
    offset = 0
    while offset < count:
        left = count - offset
        if left < ranks * chunk:
            aligned = 16 // fmt.dtype.itemsize
            chunk = (left + ranks - 1) // ranks
            chunk = (chunk + aligned - 1) // aligned * aligned

        def elements(number: int, offset: int = offset, chunk: int = chunk) -> range:
            start = offset + number % ranks * chunk
            return range(min(start, count), min(start + chunk, count, offset + ranks * chunk))

        wire = [
            [numbers[order[place]][i] for i in elements(place + ranks - 1)]
            for place in range(ranks)
        ]
        for step in range(2, ranks + 1):
            arriving = [wire[place - 1] for place in range(ranks)]
            wire = [
                [
                    add(numbers[order[place]][i], x, fmt)
                    for i, x in zip(elements(place + ranks - step), arriving[place], strict=True)
                ]
                for place in range(ranks)
            ]
        for place in range(ranks):
            for i, x in zip(elements(place), wire[place], strict=True):
                result[i] = x
        offset += ranks * chunk
    return back(result, fmt)


@formats
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 30, 700])
def test_nccl_ring(name: str, ranks: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 512 bytes, so that there are several loops."""
    fmt, values = FORMATS[name], values_of(name, ranks, count)
    monkeypatch.setitem(nccl._WIRES, "simple", nccl._Wire(512, 512, 64))
    order = [(3 * place + 1) % ranks for place in range(ranks)] if ranks % 3 else range(ranks)
    schedule = nccl.ring(count, fmt.dtype.itemsize, [list(order)])
    want = nccl_ring_simulated(values, fmt, list(order), 512 // fmt.dtype.itemsize)
    assert torch.equal(collectives.all_reduce(values, schedule), want)


def test_nccl_reduce_scatter_begins_after_the_receiver() -> None:
    """runRing of reduce_scatter.h: step 0 sends what the previous rank will receive."""
    ring = [2, 0, 3, 1]
    assert collectives.ring_shares(ring) == [(3, 1, 2, 0), (2, 0, 3, 1), (0, 3, 1, 2), (1, 2, 0, 3)]
    values = values_of("bf16", 4, 8)
    shares = collectives.reduce_scatter(values, collectives.ring_shares(ring))
    for rank, tree in enumerate(collectives.ring_shares(ring)):
        part = [value[2 * rank : 2 * rank + 2] for value in values]
        assert torch.equal(shares[rank], collectives.summed(part, tree))


# --- trees ----------------------------------------------------------------------------------------


def parent_in_btree(rank: int, ranks: int) -> int | None:
    """ncclGetBtree of trees.cc: xx01[0] and xx11[0] -> xx10[0], or xx00[0] out of bounds."""
    if rank == 0:
        return None
    bit = rank & -rank
    above = (rank ^ bit) | (bit << 1)
    return above if above < ranks else rank ^ bit


def edges(tree: SumTree) -> set[tuple[int, int]]:
    """(sender, receiver); a tuple's first entry is the one that adds."""
    if isinstance(tree, int):
        return set()
    assert isinstance(tree[0], int)
    heads = [part if isinstance(part, int) else part[0] for part in tree[1:]]
    found = {(head, tree[0]) for head in heads if isinstance(head, int)}
    return found.union(*(edges(part) for part in tree[1:]))


@pytest.mark.parametrize("nodes", range(1, 34))
def test_double_tree_of_single_gpus(nodes: int) -> None:
    first, second = nccl.double_tree([[node] for node in range(nodes)])
    parents = {node: parent_in_btree(node, nodes) for node in range(nodes)}
    assert edges(first) == {(n, p) for n, p in parents.items() if p is not None}
    mirrored = {n: (n + 1) % nodes if nodes % 2 else nodes - 1 - n for n in range(nodes)}
    assert edges(second) == {
        (mirrored[n], mirrored[p]) for n, p in parents.items() if p is not None
    }


def test_a_node_is_a_chain_that_the_nodes_below_join() -> None:
    """Four nodes of three GPUs; the first child arrives at the second GPU."""
    nodes = [[3 * node, 3 * node + 1, 3 * node + 2] for node in range(4)]
    first, _ = nccl.double_tree(nodes, "balanced")
    one, three = (3, (4, 5)), (9, (10, 11))
    two = (6, (7, 8, one), three)
    assert first == (0, (1, 2), two)
    assert nccl.double_tree([[0, 1, 2, 3]]) == ((0, (1, (2, 3))),) * 2


def test_tree_rounds_at_each_receiver() -> None:
    """((own + first) + second), in the values' own dtype."""
    values = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, 1.0)]
    assert collectives.summed(values, (0, (1, (2, 3)))).item() == 260.0  # 259 is a tie, to even
    assert collectives.summed(values, (0, 1, 2, 3)).item() == 256.0
    assert collectives.nvls_all_reduce(values).item() == 260.0
    assert collectives.summed(values, (3, (2, 1), 0)).item() == 260.0  # 259 is a tie as well


# --- channels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", nccl.TABLE, ids=lambda rules: str(rules.first))
@pytest.mark.parametrize("protocol", ["simple", "ll", "ll128"])
@pytest.mark.parametrize("channels", [1, 2, 24])
def test_channels_share_all_elements(
    rules: nccl.Rules, protocol: nccl.Protocol, channels: int
) -> None:
    for count in (1, 4096, 4097, 10**5, 10**6 + 1, 10**7):
        for algorithm in ("ring", "tree"):
            parts = nccl.parts(count, 2, channels, 8, algorithm, protocol, rules.last)
            assert [part.channel for part in parts] == list(range(len(parts)))
            assert len(parts) <= channels
            ends = [0, *(part.stop for part in parts)]
            assert [part.start for part in parts] == ends[:-1]
            assert ends[-1] == count


def test_a_small_call_uses_few_channels() -> None:
    """NCCL 2.30, 24 channels, 8 ranks, bf16: 32 KiB of traffic are worth a channel."""
    used = [len(nccl.parts(n, 2, 24, 8, "ring", "simple", (2, 30))) for n in (1000, 10**5, 10**7)]
    assert used == [1, 5, 24]


# --- NVLS, bad input ------------------------------------------------------------------------------


def test_nvls_rounds_16_bit_sums_once() -> None:
    values = values_of("bf16", 8, 500)
    want = torch.stack([v.float() for v in values]).double()
    total = torch.zeros(500)
    for value in want.float():
        total = total + value
    assert torch.equal(collectives.nvls_all_reduce(values), total.bfloat16())
    assert not torch.equal(
        collectives.nvls_all_reduce(values), collectives.summed(values, tuple(range(8)))
    )


ONES = [torch.ones(6), torch.ones(6)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(collectives.all_reduce, [], []), "at least one rank"),
        (
            partial(collectives.all_reduce, [torch.ones(6), torch.ones(5)], []),
            "one shape and dtype",
        ),
        (partial(collectives.all_reduce, [torch.ones(6, dtype=torch.int32)] * 2, []), "not known"),
        (partial(collectives.all_reduce, ONES, [Segment(0, 5, (0, 1))]), "covers 5 of 6"),
        (partial(collectives.all_reduce, ONES, [Segment(1, 6, (0, 1))]), "leaves 0 and jumps to 1"),
        (partial(collectives.all_reduce, ONES, [Segment(0, 6, (0, 0))]), "each of 2 ranks once"),
        (partial(collectives.reduce_scatter, [torch.ones(5)] * 2, [(0, 1)] * 2), "do not divide"),
        (partial(collectives.reduce_scatter, ONES, [(0, 0), (0, 1)]), "each of 2 ranks once"),
        (partial(collectives.reduce_scatter, ONES, [(0, 1)]), "1 trees for 2 ranks"),
        (partial(collectives.nvls_all_reduce, ONES, order=(0,)), "each of 2 ranks once"),
        (partial(nccl.ring, 9, 4, [[0, 1]], protocol="LL"), "known are: simple, ll, ll128"),
        (partial(nccl.ring, 9, 4, [[0, 1]], version=(2, 21)), "known are 2.23 to 2.25"),
    ],
)
def test_refused_with_a_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
