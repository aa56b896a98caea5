"""A second model of matrix units, which shares nothing with the first: rational numbers, one result
at a time, written from the published formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

NAN = "nan"
Number = Fraction | str
"""A rational number; ``nan``, ``inf``, ``-inf``; or ``-0``, a negative result that vanished."""

EMIN = {"fp16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "fp32": -126}


def dot_add(
    a: Sequence[float],
    b: Sequence[float],
    c: float,
    *,
    inputs: str,
    products: int,
    fraction_bits: int,
    output_bits: int = 24,
    output_emin: int = -126,
    output_emax: int = 127,
    nearest: bool = False,
) -> Number:
    """c plus the products, block by block of ``products``; c in the output format."""
    total: Number = number(c)
    for start in range(0, len(a), products):
        terms = [
            (number(x), number(y))
            for x, y in zip(a[start : start + products], b[start : start + products], strict=True)
        ]
        special = specials(terms, total)
        if special:
            total = special
            continue
        addend = Fraction(0) if isinstance(total, str) else total
        finite = [(x, y) for x, y in terms if isinstance(x, Fraction) and isinstance(y, Fraction)]
        exponents = [
            exponent(x, EMIN[inputs]) + exponent(y, EMIN[inputs]) for x, y in finite if x and y
        ]
        exponents += [exponent(addend, output_emin)] if addend else []
        quantum = Fraction(2) ** (max([*exponents, -126]) - fraction_bits)
        exact = sum((x * y / quantum).__trunc__() for x, y in finite)
        exact += (addend / quantum).__trunc__()
        total = rounded(exact * quantum, output_bits, output_emin, output_emax, nearest)
    return total


def number(x: float) -> Number:
    return Fraction(x) if math.isfinite(x) else str(x)


def exponent(x: Fraction, emin: int) -> int:
    """floor(log2 |x|), but at least emin."""
    found = x.numerator.bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** found:
        found -= 1
    return max(found, emin)


def specials(terms: Sequence[tuple[Number, Number]], c: Number) -> str:
    """The result where an infinity or a NaN takes part; empty where none does."""
    infinities = {c} & {"inf", "-inf"}
    for x, y in terms:
        if NAN in (x, y):
            return NAN
        if isinstance(x, str) or isinstance(y, str):
            if 0 in (x, y):
                return NAN
            infinities.add("inf" if is_negative(x) == is_negative(y) else "-inf")
    if c == NAN or len(infinities) == 2:
        return NAN
    return next(iter(infinities), "")


def is_negative(x: Number) -> bool:
    return x.startswith("-") if isinstance(x, str) else x < 0


def rounded(x: Fraction, bits: int, emin: int, emax: int, nearest: bool) -> Number:
    """To ``bits`` significant bits: towards zero, or to nearest with ties to even."""
    if not x:
        return Fraction(0)
    step = Fraction(2) ** (exponent(x, emin) - bits + 1)
    count = round(x / step) if nearest else (x / step).__trunc__()
    result = count * step
    if abs(result) >= Fraction(2) ** (emax + 1):
        return "inf" if x > 0 else "-inf"
    return result if result or x > 0 else "-0"


def as_float(x: Number) -> float:
    return float(x)
