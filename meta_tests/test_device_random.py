"""The random numbers of CUDA devices, against scalar programs written like the kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.hardware_models import curand, device_integers, device_random, torch_rules
from fixtures.hardware_models.grids import GRIDS, Grid, grid_of
from fixtures.hardware_models.offsets import offset_after
from fixtures.hardware_models.philox import philox_4x32
from fixtures.hardware_models.published import PUBLISHED, Published
from meta_tests.scalar_kernels import (
    Words,
    curand4,
    dropout_kernel,
    fma,
    grid_stride_kernel,
    rounded,
    to_normal,
    to_uniform,
    to_uniform_double,
)

SMALL = Grid("small", 1, 512, (9, 0))
"""Two blocks: a thread of it draws often."""
SEED, OFFSET = 0x1234567887654321, 4 * (2**32 - 2)  # the counter's low word overflows


def bits(hexadecimal: str) -> list[int]:
    return [int(word, 16) for word in hexadecimal.split()]


# --- Philox ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    """kat_vectors of the Random123 library, philox4x32 with 10 rounds."""
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in bits(counter))
    low, high = bits(key)
    assert [int(word[0]) for word in philox_4x32((c0, c1, c2, c3), (low, high))] == bits(expected)


DRAWN = {"seed": SEED, "gpu": SMALL, "offset": OFFSET}
SIZES = (1, 256, 257, 512, 513, 2048, 2049, 2600)
sizes = pytest.mark.parametrize("size", SIZES)


def as_list(values: Tensor) -> list[float]:
    return [float(value) for value in values.tolist()]


class TestKernels:
    @sizes
    def test_uniform(self, size: int) -> None:
        want = grid_stride_kernel(size, SMALL, SEED, OFFSET, to_uniform)
        assert as_list(device_random.uniform(size, **DRAWN)) == [u if u < 1 else 0.0 for u in want]

    @sizes
    def test_uniform_double(self, size: int) -> None:
        want = grid_stride_kernel(size, SMALL, SEED, OFFSET, to_uniform_double)
        assert as_list(device_random.uniform(size, dtype=torch.float64, **DRAWN)) == want

    def test_uniform_between_bounds(self) -> None:
        low, high = float(np.float32(-0.3)), float(np.float32(1.7))
        span = float(np.float32(high) - np.float32(low))

        def number(words: Words) -> list[float]:
            return [fma(u, span, low) for u in to_uniform(words)]

        want = grid_stride_kernel(3000, SMALL, SEED, OFFSET, number)
        assert as_list(device_random.uniform(3000, low=-0.3, high=1.7, **DRAWN)) == want

    @pytest.mark.parametrize("size", [1, 513])
    def test_normal(self, size: int) -> None:
        want = grid_stride_kernel(size, SMALL, SEED, OFFSET, to_normal)
        assert as_list(device_random.normal(size, **DRAWN)) == want

    def test_normal_with_mean_and_std(self) -> None:
        mean, std = float(np.float32(0.1)), float(np.float32(0.02))

        def number(words: Words) -> list[float]:
            return [fma(z, std, mean) for z in to_normal(words)]

        want = grid_stride_kernel(200, SMALL, SEED, OFFSET, number)
        assert as_list(device_random.normal(200, mean=0.1, std=0.02, **DRAWN)) == want

    @sizes
    def test_bernoulli(self, size: int) -> None:
        want = grid_stride_kernel(size, SMALL, SEED, OFFSET, to_uniform)
        keep = float(np.float32(0.3))
        got = device_random.bernoulli(size, 0.3, dtype=torch.bool, **DRAWN)
        assert got.tolist() == [u < keep for u in want]

    @sizes
    def test_bernoulli_of_a_tensor_is_the_same_on_every_gpu(self, size: int) -> None:
        """kernelPointwiseApply2: four neighbours a thread, as many threads as that takes."""
        threads = -(-size // 4)
        words = [next(curand4(SEED, thread, OFFSET)) for thread in range(threads)]
        uniforms = [u for four in words for u in to_uniform(four)][:size]
        p = torch.rand(size, generator=torch.Generator().manual_seed(0))
        p[::3] = torch.tensor(uniforms[::3])  # u <= p where they are equal
        got = device_random.bernoulli(size, p, dtype=torch.bool, **DRAWN)
        assert got.tolist() == [u <= limit for u, limit in zip(uniforms, p.tolist(), strict=True)]
        other = device_random.bernoulli(
            size, p, seed=SEED, offset=OFFSET, gpu="A100", dtype=torch.bool
        )
        assert torch.equal(got, other)

    @sizes
    @pytest.mark.parametrize("version", ["2.6.0", "2.13.0"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_dropout(self, size: int, version: str, dtype: torch.dtype) -> None:
        widest = 4 if version == "2.6.0" else 16 // dtype.itemsize
        width = math.gcd(size, widest)
        assert device_random.vector_width(size, dtype, version) == width
        got = device_random.dropout_mask(size, 0.1, dtype=dtype, torch_version=version, **DRAWN)
        limit = 1 - 0.1 if dtype == torch.float64 else float(np.float32(1 - 0.1))
        if width == 1:
            want = grid_stride_kernel(size, SMALL, SEED, OFFSET, to_uniform)
        else:
            want = to_uniform(dropout_kernel(size, SMALL, SEED, OFFSET, width))
        assert got.tolist() == [u < limit for u in want]

    @pytest.mark.parametrize("version", ["2.6.0", "2.13.0"])
    @pytest.mark.parametrize("high", [10, 2**28 - 1, 2**28, 2**32, 2**40])
    def test_randint(self, version: str, high: int) -> None:
        wide = high >= (2**28 if version == "2.13.0" else 2**32)

        def number(words: Words) -> list[int]:
            pairs = ((words[0] << 32) | words[1], (words[2] << 32) | words[3])
            return [word % high - 5 for word in (pairs if wide else words)]

        want = grid_stride_kernel(3000, SMALL, SEED, OFFSET, number)
        got = device_integers.randint(-5, high - 5, 3000, torch_version=version, **DRAWN)
        assert got.tolist() == want


class TestRandperm:
    @pytest.mark.parametrize("version", ["2.6.0", "2.13.0"])
    @pytest.mark.parametrize("count", [0, 1, 2, 1000, 40_000])
    def test_is_a_permutation(self, count: int, version: str) -> None:
        got = device_integers.randperm(count, torch_version=version, **DRAWN)
        assert sorted(got.tolist()) == list(range(count))

    def test_shuffles_runs_of_equal_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With three bits of key nearly all are equal: Randperm.cuh, run by run."""
        keys = device_integers.randint(
            -(2**31), 2**31 - 1, 100, dtype=torch.int32, torch_version="2.13.0", **DRAWN
        )
        after = offset_after(
            "randint",
            100,
            gpu=SMALL,
            offset=OFFSET,
            dtype=torch.int32,
            span=2**32 - 1,
            torch_version="2.13.0",
        )
        order = sorted(range(100), key=lambda i: int(keys[i]) & 7)
        first = 0
        while first < 100:
            size = sum(int(keys[i]) & 7 == int(keys[order[first]]) & 7 for i in order)
            words = (word for call in curand4(SEED, first, after) for word in call)
            for last in range(size - 1, 0, -1):
                other = first + next(words) % (last + 1)
                order[first + last], order[other] = order[other], order[first + last]
            first += size
        three_bits = (3, -(2**31), 2**31 - 1, torch.int32)
        monkeypatch.setattr(device_integers, "permutation_keys", lambda count: three_bits)
        got = device_integers.randperm(100, torch_version="2.13.0", **DRAWN)
        assert got.tolist() == order


# --- what was published -------------------------------------------------------------------------


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.name)
def test_agrees_with_what_was_published(published: Published) -> None:
    assert published.draw(published.grid) == published.printed


@pytest.mark.parametrize(
    "published", [p for p in PUBLISHED if p.name != "randn-of-three"], ids=lambda p: p.name
)
def test_another_gpu_would_not(published: Published) -> None:
    other = replace(published.grid, multiprocessors=published.grid.multiprocessors // 4)
    assert published.draw(other) != published.printed


def test_a100_and_h100_part_where_the_smaller_grid_ends() -> None:
    on_a100, on_h100 = (device_random.uniform(300_000, seed=3, gpu=gpu) for gpu in ("A100", "H100"))
    assert int((on_a100 != on_h100).nonzero()[0]) == GRIDS["A100"].blocks * 256 == 221_184


# --- 16 bit, offsets, accuracy --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
class TestHalfPrecision:
    def test_is_fp32_rounded_once(self, dtype: torch.dtype) -> None:
        for draw in (device_random.normal, device_random.exponential):
            assert torch.equal(draw(999, dtype=dtype, **DRAWN), draw(999, **DRAWN).to(dtype))

    def test_one_becomes_zero(self, dtype: torch.dtype) -> None:
        got = device_random.uniform(4999, dtype=dtype, **DRAWN)
        fp32 = device_random.uniform(4999, **DRAWN).to(dtype)
        assert (fp32 == 1).any()
        assert torch.equal(got, fp32.masked_fill(fp32 == 1, 0.0))


@pytest.mark.parametrize(
    ("draw", "size", "dtype", "steps"),
    [
        ("uniform", 1, torch.float32, 1),
        ("uniform", 2048, torch.float32, 1),
        ("uniform", 2049, torch.float32, 2),
        ("normal", 2048, torch.float64, 2),
        ("dropout_mask", 2049, torch.float64, 2),
        ("bernoulli_tensor", 10_000, torch.float32, 3),
        ("randint", 2049, torch.int64, 2),
        ("randperm", 2048, torch.int64, 514),  # two calls for keys of 64 bits, 512 for the runs
        ("uniform", 0, torch.float32, 0),
    ],
)
def test_offset_moves_by_four_for_each_call(
    draw: str, size: int, dtype: torch.dtype, steps: int
) -> None:
    got = offset_after(draw, size, gpu=SMALL, offset=8, dtype=dtype, span=9, torch_version="2.13.0")
    assert got == 8 + 4 * steps


def test_normal_is_as_accurate_as_its_bound_says() -> None:
    """Box and Muller in 50 digits, of the words themselves, lies within the stated uncertainty."""
    values, bound = (
        function(2000, **DRAWN)
        for function in (device_random.normal, device_random.normal_uncertainty)
    )

    def exact(words: Words) -> list[Any]:
        result = []
        for x, y in (words[:2], words[2:]):
            u, v = (mpmath.mpf(rounded(Fraction(word))) + 0.5 for word in (x, y))
            radius = mpmath.sqrt(-2 * mpmath.log(u / 2**32))
            result += [radius * f(2 * v / 2**32) for f in (mpmath.sinpi, mpmath.cospi)]
        return result

    want = torch.tensor([float(z) for z in grid_stride_kernel(2000, SMALL, SEED, OFFSET, exact)])
    ratio = ((values.double() - want.double()).abs() / bound).max()
    assert 0 < ratio <= 1


def test_logf_is_within_the_ulp_that_cuda_documents() -> None:
    """CUDA C++ Programming Guide: logf errs by at most 1 ulp."""
    u = np.concatenate([np.linspace(2.0**-33, 1, 60_000), 2.0 ** -np.linspace(0, 33, 40_000)])
    u = u.astype(np.float32)
    got, want = curand._logf(u), np.log(u.astype(np.float64))
    ulps = np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))
    assert 0 < ulps.max() <= 1


def test_exponential_of_one_is_not_zero() -> None:
    """Words whose u is 1, 1 - 2^-24, 2^-33, 1/2: TransformationHelper.h lifts the first two."""
    words = tuple(np.array([w], dtype=np.uint64) for w in (2**32 - 1, 2**32 - 256, 0, 2**31 - 1))
    first, second, third, fourth = (float(x[0]) for x in curand.exponential(words))
    assert (first, second) == (2.0**-24, 2.0**-24)
    assert (third, fourth) == (float(np.float32(33) * np.float32(curand.LN2)), curand.LN2)


def test_exactly_fused_where_two_roundings_would_err() -> None:
    """Sums near a tie of fp32, closer than float64 sees."""
    a, b, c = 2.0**-24 * (1.0 + 2.0**-23), 1.0 + 2.0**-22, 1.0
    tiny = 2.0**-40 * (1.0 + 2.0**-23)
    for x, y, z in ((a, b, c), (tiny, 2.0**-30, 1.0 + 2.0**-23), (-a, b, -c), (tiny, -a, 3.0)):
        assert curand.fused_exactly(np.array([x]), y, z)[0] == fma(x, y, z)
    rng = np.random.default_rng(0)
    for _ in range(300):
        x, y, z = (float(np.float32(v)) for v in rng.standard_normal(3) * [1, 1, 2.0**-20])
        assert curand.fused_exactly(np.array([x]), y, z)[0] == fma(x, y, z)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(device_random.uniform, 9, seed=0, gpu="H1000"), "unknown GPU 'H1000'; known are"),
        (partial(device_random.normal, 9, dtype=torch.int32, **DRAWN), "torch.int32 is not known"),
        (partial(device_random.normal, -1, **DRAWN), "negative"),
        (partial(device_random.normal, 2**30, **DRAWN), "draw it in parts"),
        (
            partial(device_random.normal, 9, torch_version="3.1", **DRAWN),
            "releases 2.5 to 2.6, 2.7",
        ),
        (partial(device_random.normal, 9, torch_version="next", **DRAWN), "no rules for torch 'ne"),
        (partial(device_random.normal, 9, seed=-1, gpu="A100"), "seed -1"),
        (partial(device_random.normal, 9, seed=0.5, gpu="A100"), "with an integer"),
        (partial(device_random.normal, 9, seed=1, gpu="A100", offset=3), "multiples of 4"),
        (partial(device_random.normal, 9, seed=1, gpu="A100", offset=2**64), "below 2^64"),
        (partial(device_random.exponential, 9, rate=0.0, **DRAWN), "positive and finite"),
        (partial(device_random.uniform, 9, high=math.inf, **DRAWN), "give finite low"),
        (partial(device_random.bernoulli, 9, 1.5, **DRAWN), "1.5"),
        (partial(device_random.bernoulli, 9, torch.ones(8), **DRAWN), "probabilities of (8,)"),
        (partial(device_random.dropout_mask, 9, -0.1, **DRAWN), "a probability lies in"),
        (partial(device_random.uniform, 9, low=1, high=0, **DRAWN), "low <= high"),
        (partial(device_integers.randint, 4, 4, 9, **DRAWN), "low < high"),
        (partial(offset_after, "gumbel", 9, gpu="A100"), "unknown draw 'gumbel'; known are"),
        (partial(Grid, "none", 0, 2048, (9, 0)), "at least 1"),
        (partial(grid_of, "b200"), "H100 PCIe"),
    ],
)
def test_refused_with_a_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("grids", "shared"), [(4, True), (8, False)])
def test_half_of_a_16_bit_mask_is_in_the_next_one_where_calls_are_odd(
    grids: int, shared: bool
) -> None:
    """Dropout.cu reserves a call for 4 elements of a thread; the kernel for 8 makes two."""
    count = 512 * grids
    draw = partial(
        device_random.dropout_mask,
        count,
        0.5,
        seed=SEED,
        gpu=SMALL,
        dtype=torch.bfloat16,
        torch_version="2.13",
    )
    after = offset_after(
        "dropout_mask", count, gpu=SMALL, dtype=torch.bfloat16, torch_version="2.13"
    )
    first, second = (draw(offset=offset).view(-1, 8) for offset in (0, after))
    assert torch.equal(first[:, 4:], second[:, :4]) is shared


def test_dropout_of_all_or_nothing_draws_nothing() -> None:
    assert device_random.dropout_mask(5, 0.0, **DRAWN).all()
    assert not device_random.dropout_mask(5, 1.0, **DRAWN).any()


@pytest.mark.parametrize("minor", range(5, 15))
def test_every_release_from_2_5_to_2_14_has_rules(minor: int) -> None:
    assert torch_rules.rules_of(f"2.{minor}.1+cu130") in torch_rules.TABLE
