"""torch's CUDA kernels that draw random numbers, as scalar programs: slow, plain, and apart from
what they test but for the coefficients of the logarithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath
import numpy as np

from fixtures.hardware_models import curand
from fixtures.hardware_models.grids import Grid

Words = Sequence[int]


@cache
def scalar_philox(counter: int, key: int) -> tuple[int, ...]:
    """The definition, on Python's integers."""
    word = [(counter >> (32 * i)) & 0xFFFFFFFF for i in range(4)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * word[0], 0xCD9E8D57 * word[2]
        word = [
            (right >> 32) ^ word[1] ^ keys[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ word[3] ^ keys[1],
            left & 0xFFFFFFFF,
        ]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return tuple(word)


def curand4(seed: int, thread: int, offset: int) -> Iterator[Words]:
    """curand_init, then curand4 for ever: a counter of 128 bits, the thread in its upper half."""
    counter = offset // 4 + (thread << 64)
    while True:
        yield scalar_philox(counter % 2**128, seed)
        counter += 1


# --- the kernels, thread by thread --------------------------------------------------------------


def blocks_of(count: int, grid: Grid) -> int:
    return min((count + 255) // 256, grid.multiprocessors * (grid.threads // 256))


def grid_stride_kernel(
    count: int, grid: Grid, seed: int, offset: int, number: Callable[[Words], list[Any]]
) -> list[Any]:
    """distribution_elementwise_grid_stride_kernel of DistributionTemplates.h."""
    threads, result = 256 * blocks_of(count, grid), [None] * count
    for thread in range(threads):
        calls, index = curand4(seed, thread, offset), thread
        unroll = len(number([1] * 4))
        while index < (-(-count // (threads * unroll))) * threads * unroll:
            for i, value in enumerate(number(next(calls))):
                if index + threads * i < count:
                    result[index + threads * i] = value
            index += threads * unroll
    return result


def dropout_kernel(count: int, grid: Grid, seed: int, offset: int, width: int) -> list[int]:
    """fused_dropout_kernel_vec of Dropout.cu: the word that decides on each element."""
    threads, result = 256 * blocks_of(count, grid), [0] * count
    for thread in range(threads):
        calls = curand4(seed, thread, offset)
        for index in range(thread * width, count, threads * width):
            words = [word for _ in range((width + 3) // 4) for word in next(calls)]
            result[index : index + width] = words[:width]
    return result


def rounded(value: Fraction) -> float:
    """To fp32, to nearest even, of a normal number; exact until then."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) - 23
    scaled = value / Fraction(2) ** exponent
    while abs(scaled) >= 2**24:
        scaled, exponent = scaled / 2, exponent + 1
    return float(round(scaled) * Fraction(2) ** exponent)


def fma(a: float, b: float, c: float) -> float:
    return rounded(Fraction(a) * Fraction(b) + Fraction(c))


@cache
def to_unit(word: int) -> float:
    return fma(rounded(Fraction(word)), 2.0**-32, 2.0**-33)


def to_uniform(words: Words) -> list[float]:
    return [to_unit(word) for word in words]


def to_uniform_double(words: Words) -> list[float]:
    pairs = ((words[0] ^ (words[1] << 21)), (words[2] ^ (words[3] << 21)))
    return [pair * 2.0**-53 + 2.0**-54 for pair in pairs]


def logf(u: float) -> float:
    """CUDA's logf, from the machine code: see curand.py."""
    mantissa, exponent = math.frexp(u)
    while mantissa < np.float32(2 / 3):
        mantissa, exponent = mantissa * 2, exponent - 1
    f = rounded(Fraction(mantissa) - 1)
    total = curand._LOG_FIRST
    for coefficient in curand._LOG:
        total = fma(f, total, coefficient)
    total = fma(f, rounded(Fraction(f) * Fraction(total)), f)
    return fma(exponent, curand.LN2, total)


def to_normal(words: Words) -> list[float]:
    result = []
    for x, y in (words[:2], words[2:]):
        radius = float(np.sqrt(np.float32(-2.0 * logf(to_uniform([x])[0]))))
        angle = fma(
            rounded(Fraction(y)), float(np.float32(2 * np.pi)) * 2.0**-32, curand._ANGLE / 2
        )
        turns = Fraction(angle) * Fraction(float(np.float32(1 / (2 * np.pi))))
        unit = Fraction(2) ** (math.floor(math.log2(turns)) - 23)
        chopped = turns // unit * unit
        for function in (mpmath.sinpi, mpmath.cospi):
            value = function(2 * mpmath.mpf(chopped.numerator) / chopped.denominator)
            sine = rounded(Fraction(str(mpmath.nstr(value, 40))))
            result.append(rounded(Fraction(sine) * Fraction(radius)))
    return result
