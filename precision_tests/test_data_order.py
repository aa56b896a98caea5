"""Data order: which sample a step sees, on which rank, and again after a resume.

What goes wrong: set_epoch is forgotten, so that every epoch has one order; ranks stand an epoch
apart, so that samples are seen twice or never; the generator's state is lost at a restart; workers
share a random stream; a metric is a mean of batch means.

Theorems: a sampler over W ranks cuts [0, n) into W parts, ceil(n/W) W - n samples counted twice or
n mod W left out. torch.randperm is Fisher and Yates's shuffle (Durstenfeld, Algorithm 235, CACM
1964), so that every order is as likely: counts of orders are binomial. A sum over ranks differs
from that of one process by rounding only (Higham, Accuracy and Stability, (4.4)).

Truth: orders and seeds from an independent MT19937, ``numerics/mersenne_twister.py``; workers'
streams from numpy's SeedSequence and Python's random. Samplers draw on the CPU whatever the device,
so most cases are of the CPU; randperm itself and the flow run on every device.

Claims of the ledger: 92 (the loader seeds with the epoch: false, it draws two 64-bit seeds from the
global generator, its own and the sampler's; DistributedSampler takes seed + epoch), 93 (not
reproducible by a fixed seed: false, the order is predicted bit for bit; a draw before it moves it),
94 (ranks an epoch apart: measured 240 of 1000 samples twice and 240 never at W = 2, here the flow;
seed 1 epoch 0 is seed 0 epoch 1), 95 (RandomSampler with a generator of its own: a restart repeats
epoch 0 unless the state was kept), 96 (the order of evaluation moves a metric: only a mean of
uneven batches' means, .4815 to .5348 there).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.distributed.ranks import RunRanks
from fixtures.golden import Golden, LoadTruth, Truth
from fixtures.numerics import data_order_bounds, errors, mersenne_twister, order_references
from fixtures.numerics.formats import FP64
from fixtures.numerics.mersenne_twister import MersenneTwister
from fixtures.training import epochs, loading

SEED = 2718
COUNT = 23  # samples: no multiple of a batch or of a number of ranks
BATCH = 4
EPOCHS = 3
# Around vector widths and around the 624 words that the generator makes at once.
SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 623, 624, 625, 626, 1249, 4097)

drop_lasts = pytest.mark.parametrize("drop_last", [False, True], ids=["padded", "dropped"])
worker_counts = pytest.mark.parametrize("workers", [0, 1, 2], ids=lambda w: f"workers{w}")


# --- golden cases -------------------------------------------------------------------------------


def permutation_truth() -> Truth:
    """The order of every size, and the word that the generator gives after it."""
    orders, following = {}, []
    for size in SIZES:
        source = MersenneTwister(SEED)
        orders[f"n{size}"] = torch.from_numpy(source.permutation(size)).int()
        following.append(int(source.below(loading.BELOW, 1)[0]))
    return Truth(inputs={}, values=orders | {"following": torch.tensor(following)})


def epochs_truth(own_generator: bool, drawn_before: int) -> Truth:
    """Three epochs of a shuffling loader."""
    orders = order_references.shuffled_epochs(
        SEED, COUNT, EPOCHS, own_generator=own_generator, drawn_before=drawn_before
    )
    return _numbered("epoch", orders)


def distributed_truth() -> Truth:
    """DistributedSampler shuffles with a generator seeded by seed + epoch."""
    orders = [MersenneTwister(SEED + epoch).permutation(COUNT) for epoch in range(EPOCHS)]
    return _numbered("epoch", orders)


def worker_truth() -> Truth:
    """Four numbers of each stream of two workers."""
    return _numbered("worker", order_references.worker_streams(SEED, 2, 4, loading.BELOW))


def _numbered(name: str, arrays: list[order_references.Integers]) -> Truth:
    values = {f"{name}{number}": torch.from_numpy(array) for number, array in enumerate(arrays)}
    return Truth(inputs={}, values=values)


def _golden(name: str, generate: Any, **arguments: Any) -> Golden:
    return Golden(
        node="data_order",
        name=name,
        generate=generate,
        arguments=arguments,
        precision="integers from an independent MT19937",
        bound="exact",
        uses=(mersenne_twister, order_references, _numbered),
    )


LOADERS = {
    "global-generator": {"own_generator": False, "drawn_before": 0},
    "global-generator-after-rand": {"own_generator": False, "drawn_before": 1},
    "own-generator": {"own_generator": True, "drawn_before": 0},
}
GOLDEN = (
    _golden("permutation", permutation_truth),
    _golden("distributed", distributed_truth),
    _golden("workers", worker_truth),
    *(_golden(name, epochs_truth, **arguments) for name, arguments in LOADERS.items()),
)


def generator(seed: int = SEED) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- promise: bound -----------------------------------------------------------------------------


class TestBound:
    @example(sizes=(2, 7), epoch=0, shuffle=True)
    @given(
        sizes=st.tuples(st.integers(1, 60), st.integers(1, 8)),
        epoch=st.integers(0, 3),
        shuffle=st.booleans(),
    )
    @drop_lasts
    def test_ranks_partition_the_samples(
        self, check: Check, sizes: tuple[int, int], epoch: int, shuffle: bool, drop_last: bool
    ) -> None:
        """Without dropping every sample is there, padding as even as can be; with it, none twice.

        The numbers of samples seen k times, k = 0, 1, ..., are thereby fixed.
        """
        (count, world_size), shares = sizes, []
        for rank in range(world_size):
            sampler = DistributedSampler(
                range(count), world_size, rank, shuffle=shuffle, drop_last=drop_last
            )
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
            check.exact(len(shares[rank]), len(sampler), name="length")
        total = world_size * (count // world_size if drop_last else -(-count // world_size))
        seen = Counter(index for share in shares for index in share)
        often = total // count
        expected = {often: count - total % count, often + 1: total % count}
        got = Counter(seen[index] for index in range(count))
        check.exact({len(share) for share in shares}, {total // world_size}, name="even")
        check.exact(dict(got), {k: n for k, n in expected.items() if n})

    @given(count=st.integers(0, 60), batch=st.integers(1, 9))
    @drop_lasts
    def test_batches_partition_the_samples(
        self, check: Check, count: int, batch: int, drop_last: bool
    ) -> None:
        """In order, all of the same size but the last, and as many as ``len`` says."""
        sampler = data.BatchSampler(data.SequentialSampler(range(count)), batch, drop_last)
        batches = list(sampler)
        starts = range(0, count - batch + 1 if drop_last else count, batch)
        want = [list(range(start, min(start + batch, count))) for start in starts]
        check.exact(batches, want)
        check.exact(len(sampler), len(want), name="length")

    @example(seed=2**32, count=5)
    @example(seed=-1, count=625)
    @given(seed=st.integers(-(2**63), 2**64 - 1), count=st.integers(0, 700))
    def test_any_seed_gives_the_order_of_its_words(
        self, check: Check, seed: int, count: int
    ) -> None:
        want = torch.from_numpy(MersenneTwister(seed).permutation(count))
        check.exact(torch.randperm(count, generator=generator(seed)), want)

    def test_every_order_is_as_likely(self, check: Check) -> None:
        """All 24 orders of four. Remainders of 32-bit words prefer none by more than 2^-28."""
        source, trials = generator(), 20_000
        drawn = Counter(tuple(torch.randperm(4, generator=source).tolist()) for _ in range(trials))
        counts = [drawn[order] for order in itertools.permutations(range(4))]
        check.exact(sum(counts), trials, name="nothing-else")
        got = torch.tensor(counts, dtype=torch.float64)
        bound = data_order_bounds.equally_likely(trials, 24)
        check.within(got, torch.full((24,), trials / 24, dtype=torch.float64), bound)


# --- promise: op --------------------------------------------------------------------------------


class TestOp:
    @pytest.mark.sentinel
    @pytest.mark.parametrize("size", SIZES, ids=lambda n: f"n{n}")
    def test_permutation(self, check: Check, truth: LoadTruth, size: int) -> None:
        """The order, and how much it takes from the generator."""
        case, source = truth("permutation"), generator()
        got = torch.randperm(size, generator=source)
        check.exact(got.int(), case.values[f"n{size}"], inputs=case.digest)
        want = int(case.values["following"][SIZES.index(size)])
        check.exact(loading.next_number(source), want, name="following", inputs=case.digest)

    def test_permutation_in_other_dtypes(self, check: Check, truth: LoadTruth) -> None:
        """All hold 0 .. 64 exactly."""
        case = truth("permutation")
        for dtype in (torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float64):
            got = torch.randperm(65, generator=generator(), dtype=dtype)
            check.exact(got.int(), case.values["n65"], name=str(dtype), inputs=case.digest)

    @pytest.mark.parametrize("size", [0, 1, 7, 1000, 40_000], ids=lambda n: f"n{n}")
    def test_permutation_on_device(self, check: Check, device: Device, size: int) -> None:
        """Each once, and the same from the same state. CUDA has an algorithm of its own."""
        source = torch.Generator(device.torch).manual_seed(SEED)
        first = torch.randperm(size, generator=source, device=device.torch)
        again = torch.randperm(size, generator=source.manual_seed(SEED), device=device.torch)
        check.exact(first.sort().values.cpu(), torch.arange(size), name="each-once")
        check.exact(again, first, name="again")

    @pytest.mark.parametrize("source", LOADERS)
    @worker_counts
    def test_shuffling_loader(
        self, check: Check, truth: LoadTruth, workers: int, source: str
    ) -> None:
        """The same whatever the number of workers. One number drawn before it moves the order;
        with a generator of its own a loader neither uses the global one nor moves it."""
        case = truth(source)
        torch.manual_seed(SEED)
        if source.endswith("rand"):
            torch.rand(())
        own = generator() if source == "own-generator" else None
        loader = loading.loader_of(range(COUNT), BATCH, own, num_workers=workers)
        for epoch in range(EPOCHS if workers < 2 else 1):
            want = case.values[f"epoch{epoch}"]
            check.exact(loading.in_order(loader), want, name=f"epoch{epoch}", inputs=case.digest)
        if own:
            unmoved = int(MersenneTwister(SEED).below(loading.BELOW, 1)[0])
            check.exact(loading.next_number(), unmoved, name="global-unmoved")

    def test_loader_draws_though_it_does_not_shuffle(self, check: Check) -> None:
        """One 64-bit seed for its workers, even with none; not with a generator of its own."""
        for name, own, drawn in (("global", None, 2), ("own", generator(), 0)):
            torch.manual_seed(SEED)
            check.exact(
                loading.in_order(data.DataLoader(range(5), generator=own)),
                torch.arange(5),
                name=name,
            )
            want = int(MersenneTwister(SEED).below(loading.BELOW, drawn + 1)[drawn])
            check.exact(loading.next_number(), want, name=f"{name}-following")

    def test_generator_whose_state_was_not_kept(self, check: Check, truth: LoadTruth) -> None:
        """A restart repeats epoch 0. After an epoch that was left early comes another order than
        after a whole one: that of the words drawn so far."""
        case, source = truth("own-generator"), MersenneTwister(SEED)
        loader = loading.loader_of(range(COUNT), BATCH, generator())
        next(iter(loader))
        for _ in range(2):
            source.seed()
            want = source.permutation(COUNT)
        check.exact(loading.in_order(loader), torch.from_numpy(want), name="left-early")
        got = loading.in_order(loading.loader_of(range(COUNT), BATCH, generator()))
        check.exact(got, case.values["epoch0"], name="restarted", inputs=case.digest)

    def test_other_samplers(self, check: Check) -> None:
        """With replacement by remainders, 32 words at a time; subsets and splits by permutation.

        Of the weighted one, torch.multinomial, whose stream moved between releases, a record."""
        samples = range(COUNT)
        with_replacement = data.RandomSampler(samples, True, num_samples=70, generator=generator())
        want = MersenneTwister(SEED).below(COUNT, 70).tolist()
        check.exact(list(with_replacement), want, name="replacement")
        source = MersenneTwister(SEED)
        want = [*source.permutation(COUNT).tolist(), *source.permutation(COUNT).tolist()[:7]]
        more = data.RandomSampler(samples, num_samples=COUNT + 7, generator=generator())
        check.exact(list(more), want, name="more-than-there-are")
        order = MersenneTwister(SEED).permutation(COUNT).tolist()
        subset = data.SubsetRandomSampler([10 * i for i in samples], generator=generator())
        check.exact(list(subset), [10 * i for i in order], name="subset")
        parts = data.random_split(samples, [10, COUNT - 10], generator=generator())
        check.exact([*parts[0].indices, *parts[1].indices], order, name="split")

        weights = [0.0, 1.0, 2.0, 3.0]
        weighted = list(data.WeightedRandomSampler(weights, 50, generator=generator()))
        check.exact(0 in weighted, False, name="zero-weight")
        check.observe(weighted, name="multinomial-stream")

    @drop_lasts
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids=lambda w: f"w{w}")
    def test_distributed_sampler(
        self, check: Check, truth: LoadTruth, world_size: int, drop_last: bool
    ) -> None:
        """Rank r takes every W-th of the order, which is cut or padded with its own beginning."""
        case = truth("distributed")
        rounded = COUNT // world_size if drop_last else -(-COUNT // world_size)
        for epoch in range(EPOCHS):
            order = case.values[f"epoch{epoch}"]
            padded = torch.cat([order, order])[: rounded * world_size]
            for rank in range(world_size):
                sampler = distributed(world_size, rank, epoch, drop_last=drop_last)
                got, want = torch.tensor(list(sampler)), padded[rank::world_size]
                check.exact(got, want, name=f"epoch{epoch}-rank{rank}", inputs=case.digest)

    def test_set_epoch(self, check: Check) -> None:
        """Another order with each; none without it. Seed and epoch are but added."""
        sampler = DistributedSampler(range(COUNT), 2, 0)
        check.exact(list(sampler) == list(sampler), True, name="forgotten")
        check.exact(len({tuple(distributed(2, 0, e)) for e in range(EPOCHS)}), EPOCHS)
        collision = [list(distributed(2, 0, epoch, seed=1 - epoch)) for epoch in (0, 1)]
        check.exact(collision[0], collision[1], name="seed-plus-epoch")

    def test_worker_streams(self, check: Check, truth: LoadTruth) -> None:
        """Each worker has streams of its own in torch, numpy and random, and known ones."""
        case = truth("workers")
        torch.manual_seed(SEED)
        options = {"num_workers": 2, "multiprocessing_context": "fork"}
        rows = torch.stack(
            [torch.tensor(row) for row in data.DataLoader(loading.Numbered(8), None, **options)]
        )
        check.exact(rows[:, 0], torch.arange(8), name="order")
        check.exact(len(rows[:, 2:].unique()), 3 * 8, name="distinct")
        for worker in range(2):
            got, want = rows[rows[:, 1] == worker, 2:], case.values[f"worker{worker}"]
            check.exact(got, want, name=f"worker{worker}", inputs=case.digest)

    @pytest.mark.parametrize("epoch", [0, 1], ids=["epoch0", "epoch1"])
    @pytest.mark.parametrize("workers", [0, 2], ids=lambda w: f"workers{w}")
    def test_resume_in_mid_epoch(
        self, check: Check, truth: LoadTruth, epoch: int, workers: int
    ) -> None:
        """The remaining order, and the next epoch's after it, in a loader made anew."""
        case, source = truth("own-generator"), generator()
        loader = loading.loader_of(range(COUNT), BATCH, source)
        for _ in range(epoch):
            list(loader)
        position = loading.Position(source.get_state(), batches=2)
        anew = loading.loader_of(range(COUNT), BATCH, torch.Generator(), num_workers=workers)
        want = case.values[f"epoch{epoch}"][2 * BATCH :]
        check.exact(loading.in_order(loading.resumed(anew, position)), want, inputs=case.digest)
        want = case.values[f"epoch{epoch + 1}"]
        check.exact(loading.in_order(anew), want, name="next-epoch", inputs=case.digest)

    def test_metric_does_not_depend_on_the_order(self, check: Check) -> None:
        """23 samples in batches of 4: the last has 3. Means of batch means are the control."""
        scores = torch.tensor([math.sqrt(i) % 1.0 for i in range(COUNT)], dtype=torch.float64)
        want = math.fsum(scores.tolist()) / COUNT
        loader = loading.loader_of(range(COUNT), BATCH, generator())
        means, unweighted = [], []
        for _ in range(20):
            batches = [(float(scores[batch].mean()), batch) for batch in loader]
            means.append(loading.mean_over_samples(batches))
            unweighted.append(math.fsum(mean for mean, _ in batches) / len(batches))
        bound = data_order_bounds.weighted_mean(scores, BATCH)
        got = torch.tensor(means, dtype=torch.float64)
        check.within(got, torch.full_like(got, want), bound)
        control = errors.compare(
            torch.tensor(unweighted, dtype=torch.float64),
            torch.full_like(got, want),
            bound.limit,
            FP64,
        )
        check.exact(control.margin > 1, True, name="control-exceeds")


def distributed(
    world_size: int, rank: int, epoch: int, seed: int = SEED, drop_last: bool = False
) -> DistributedSampler[int]:
    sampler = DistributedSampler(range(COUNT), world_size, rank, seed=seed, drop_last=drop_last)
    sampler.set_epoch(epoch)
    return sampler


# --- promise: flow ------------------------------------------------------------------------------


class TestFlow:
    @pytest.mark.parametrize("implementation", ["data_parallel", "fully_shard"])
    @pytest.mark.parametrize("world_size", [2, 4], ids=lambda w: f"w{w}")
    def test_epoch_over_ranks_equals_one_process(
        self, check: Check, ranks: RunRanks, device: Device, world_size: int, implementation: str
    ) -> None:
        """Every sample once: the sum of the same gradients, in another order."""
        single = epochs.gradients_alone(device.torch)
        shares = torch.stack([torch.cat([g.flatten().cpu() for g in s.values()]) for s in single])
        sharded = implementation == "fully_shard"
        gradients = ranks(epochs.gradient_over_ranks, world_size, sharded, 1)[0]
        got = torch.cat([gradients[name].flatten().cpu() for name in single[0]])
        bound = data_order_bounds.regrouped_sum(shares.abs().sum(0), len(single), world_size)
        check.within(got, shares.cumsum(0)[-1], bound)

    @pytest.mark.parametrize("epoch", [0, 1], ids=["epoch0", "epoch1"])
    @pytest.mark.parametrize("workers", [0, 2], ids=lambda w: f"workers{w}")
    def test_step_after_a_resume_is_bitwise_equal(
        self, check: Check, device: Device, epoch: int, workers: int
    ) -> None:
        """In mid-epoch, from the kept position, weights, optimizer and scaler."""
        through, resumed = epochs.across_a_resume(device.torch, epoch, workers)
        check.exact(resumed, through)
