"""References: accurate where they say so, and an fp32 truth that ignores their last bits."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from fixtures.numerics import references
from fixtures.numerics.formats import BF16, FP16, all_values
from fixtures.numerics.references import (
    FLOOR,
    GELU_ERF_ULPS,
    GELU_TANH_ULPS,
    Array,
    Float64Function,
    MpFunction,
    round_once,
)

CASES = {
    "gelu_erf": GELU_ERF_ULPS,
    "gelu_erf_gradient": GELU_ERF_ULPS,
    "gelu_tanh": GELU_TANH_ULPS,
    "gelu_tanh_gradient": GELU_TANH_ULPS,
}
every_function = pytest.mark.parametrize(("name", "ulps"), CASES.items(), ids=CASES.keys())


def pair(name: str) -> tuple[Float64Function, MpFunction]:
    return getattr(references, name), getattr(references, f"{name}_mp")


def points() -> Array:
    random = np.random.default_rng(5)
    return np.concatenate(
        [
            random.uniform(-16, 8, 150),
            random.uniform(-0.8, -0.7, 60),  # the gradients vanish at -0.75
            -(10.0 ** random.uniform(-40, 1.5, 60)),
            10.0 ** random.uniform(-40, 38, 40),
            [0.0, -38.0, -1e30, -0.751791524693564, -0.752461422069786],
        ]
    )


@every_function
def test_float64_is_within_its_stated_ulps_of_50_digits(name: str, ulps: float) -> None:
    function, precise = pair(name)
    x = points()
    with mpmath.workdps(50):
        for point, value in zip(x, function(x), strict=True):
            error = abs(precise(mpmath.mpf(point)) - mpmath.mpf(value))
            assert error <= ulps * np.spacing(max(abs(value), FLOOR)), point


@every_function
def test_limits_at_the_infinities_and_nan(name: str, ulps: float) -> None:
    low, high, undefined = pair(name)[0](np.array([-np.inf, np.inf, np.nan]))
    assert low == 0.0
    assert np.signbit(low)
    assert high == (1.0 if "gradient" in name else np.inf)
    assert np.isnan(undefined)


def test_hand_checked_values() -> None:
    """Phi(1) and pdf(1) from tables of the normal law, to 15 digits."""
    cdf, pdf = 0.841344746068543, 0.241970724519143
    x = np.array([1.0, -1.0])
    np.testing.assert_allclose(references.gelu_erf(x), [cdf, cdf - 1], rtol=1e-14)
    np.testing.assert_allclose(
        references.gelu_erf_gradient(x), [cdf + pdf, 1 - cdf - pdf], rtol=2e-14
    )
    assert references.gelu_tanh(np.array([1.0])) == pytest.approx(0.8411919906082768, rel=1e-14)


@every_function
def test_gradients_are_the_derivatives(name: str, ulps: float) -> None:
    if "gradient" in name:
        function = pair(name.removesuffix("_gradient"))[1]
        with mpmath.workdps(40):
            for x in (-7.25, -0.75, 0.5, 3.0):
                derivative = mpmath.diff(function, mpmath.mpf(x))
                assert pair(name)[1](mpmath.mpf(x)) == pytest.approx(derivative, rel=1e-15)


@every_function
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=["bf16", "fp16"])
def test_truth_of_all_16_bit_inputs_ignores_the_last_bits(name: str, ulps: float, fmt: Any) -> None:
    function, precise = pair(name)
    x = all_values(fmt).double().numpy()
    random = np.random.default_rng(1)

    def disturbed(x: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return function(x) * (1 + 100 * 2.0**-53 * random.uniform(-1, 1, x.shape))

    truth = round_once(function, precise, x, ulps)
    again = round_once(disturbed, precise, x, ulps + 100)
    assert truth.dtype == np.float32
    assert truth.tobytes() == again.tobytes()


@every_function
def test_50_digits_give_the_same_bytes_as_float64(name: str, ulps: float) -> None:
    function, precise = pair(name)
    x = points()
    calls = 0

    def counted(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return precise(x)

    truth = round_once(function, counted, x, ulps)
    few, calls = calls, 0
    forced = round_once(function, counted, x, 2.0**40)  # nothing is clear to float64
    assert few <= 2
    assert calls > len(x) // 2
    assert truth.tobytes() == forced.tobytes()


def test_a_tie_that_float64_sees_is_decided_by_50_digits() -> None:
    """1 + 2^-24 + 2^-80: to float64 it is a tie, which would fall to 1."""

    def seen(x: Array) -> Array:
        return np.full_like(x, 1 + 2.0**-24)

    def exact(x: Any) -> Any:
        return 1 + mpmath.mpf(2) ** -24 + x * mpmath.mpf(2) ** -80

    x = np.array([1.0, -1.0])
    assert seen(x).astype(np.float32).tolist() == [1.0, 1.0]
    assert round_once(seen, exact, x, 1.0).tolist() == [1 + 2.0**-23, 1.0]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("1", 0x3F800000),
        ("1.000000059604644775390625", 0x3F800000),  # 1 + 2^-24, a tie to even
        ("1.000000178813934326171875", 0x3F800002),  # 1 + 3 2^-24, a tie to even
        ("0.99999997019767761", 0x3F7FFFFF),
        ("1.4e-45", 0x00000001),
        ("7.1e-46", 0x00000001),
        ("7.0e-46", 0x00000000),
        ("-1.1754942e-38", 0x807FFFFF),
        ("3.4028235e38", 0x7F7FFFFF),
        ("3.4028236e38", 0x7F800000),
        ("1e5000", 0x7F800000),
        ("-inf", 0xFF800000),
        ("0", 0x00000000),
    ],
)
def test_50_digits_are_rounded_once(value: str, word: int) -> None:
    with mpmath.workdps(50):
        rounded = references._round_mp(mpmath.mpf(value))
    assert rounded.view(np.uint32) == word


def test_shapes_are_kept_and_nan_has_one_pattern() -> None:
    function, precise = pair("gelu_erf_gradient")
    assert round_once(function, precise, np.array(1.0), 64).shape == ()
    assert round_once(function, precise, np.empty((0, 3)), 64).shape == (0, 3)
    grid = np.array([[np.nan, 1.0], [-np.nan, 2.0]])
    rounded = round_once(function, precise, grid, 64)
    assert rounded.view(np.uint32)[:, 0].tolist() == [0x7FC00000] * 2
