"""Formats: their numbers, spacings, neighbours, and a rounding that happens once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.numerics.formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    FP64,
    TF32,
    Format,
    all_values,
    format_of,
    from_bits,
    next_down,
    next_up,
    round_to,
    spacing,
    to_bits,
)

any_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
sixteen_bits = pytest.mark.parametrize("fmt", [BF16, FP16], ids=["bf16", "fp16"])


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestParameters:
    @pytest.mark.parametrize(
        ("fmt", "largest", "normal", "subnormal"),
        [
            (BF16, 0x7F7F, 0x0080, 0x0001),
            (FP16, 0x7BFF, 0x0400, 0x0001),
            (FP32, 0x7F7FFFFF, 0x00800000, 0x00000001),
            (TF32, 0x7F7FE000, 0x00800000, 0x00002000),
            (FP64, 0x7FEFFFFFFFFFFFFF, 0x0010000000000000, 0x0000000000000001),
        ],
        ids=["bf16", "fp16", "fp32", "tf32", "fp64"],
    )
    def test_extremes_are_these_words(
        self, fmt: Format, largest: int, normal: int, subnormal: int
    ) -> None:
        numbers = torch.tensor(
            [fmt.max, fmt.smallest_normal, fmt.smallest_subnormal], dtype=fmt.dtype
        )
        assert to_bits(numbers).tolist() == [largest, normal, subnormal]

    def test_unit_roundoffs(self) -> None:
        assert [fmt.unit_roundoff for fmt in FORMATS.values()] == [
            2.0**-8,
            2.0**-11,
            2.0**-11,
            2.0**-24,
            2.0**-53,
        ]

    @any_format
    def test_dtype_and_name_find_the_format(self, fmt: Format) -> None:
        assert format_of(fmt.name) is format_of(fmt) is fmt
        assert format_of(fmt.dtype) is (FP32 if fmt is TF32 else fmt)

    @pytest.mark.parametrize("what", ["fp8", torch.int32])
    def test_an_unknown_format_is_refused_with_the_known_ones(self, what: object) -> None:
        with pytest.raises(ValueError, match=r"bf16, fp16, tf32, fp32, fp64 .* torch\.bfloat16"):
            format_of(what)  # type: ignore[arg-type]


class TestSpacing:
    @any_format
    def test_spacing_at_hand_checked_points(self, fmt: Format) -> None:
        ulp = 2.0 * fmt.unit_roundoff
        below_two = math.nextafter(2.0, 0.0)
        points = f64(1.0, -1.0, below_two, 2.0, fmt.smallest_normal, fmt.smallest_normal / 4)
        least = fmt.smallest_subnormal
        assert spacing(points, fmt).tolist() == [ulp, ulp, ulp, 2 * ulp, least, least]
        assert spacing(f64(0.0, -0.0), fmt).tolist() == [least, least]

    @any_format
    def test_beyond_the_largest_number_it_is_that_of_the_last_binade(self, fmt: Format) -> None:
        last = math.ldexp(2.0 * fmt.unit_roundoff, fmt.emax)
        points = f64(fmt.max, math.inf, -math.inf, math.nan)
        assert spacing(points, fmt).tolist() == [last] * 4

    @pytest.mark.parametrize(("fmt", "dtype"), [(FP32, np.float32), (FP64, np.float64)])
    @given(data=st.data())
    def test_spacing_is_that_of_numpy(self, fmt: Format, dtype: type, data: st.DataObject) -> None:
        x = data.draw(st.floats(0.0, fmt.max / 2, width=32 if fmt is FP32 else 64))
        with np.errstate(all="ignore"):
            assert spacing(f64(x), fmt).item() == float(np.spacing(dtype(x)))

    def test_another_dtype_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"spacing takes a float64 .* \.double\(\)"):
            spacing(torch.ones(1), FP32)

    def test_shapes_are_kept(self) -> None:
        assert spacing(f64().reshape(0, 3), BF16).shape == (0, 3)
        assert spacing(torch.tensor(1.0, dtype=torch.float64), BF16).shape == ()
        transposed = f64(1.0, 2.0, 4.0, 8.0).reshape(2, 2).T
        assert spacing(transposed, FP64).tolist() == [[2.0**-52, 2.0**-50], [2.0**-51, 2.0**-49]]


class TestRounding:
    @pytest.mark.parametrize(("fmt", "dtype"), [(FP16, np.float16), (FP32, np.float32)])
    @given(data=st.data())
    def test_it_is_the_ieee_conversion(self, fmt: Format, dtype: type, data: st.DataObject) -> None:
        x = data.draw(st.floats() | st.floats(-2 * fmt.smallest_normal, 2 * fmt.smallest_normal))
        with np.errstate(over="ignore"):
            wanted = np.float64(dtype(x))
        rounded = round_to(f64(x), fmt).numpy()
        np.testing.assert_array_equal(rounded, [wanted])
        assert math.isnan(x) or np.signbit(rounded[0]) == np.signbit(x)

    @any_format
    @given(x=st.floats(allow_nan=False, allow_infinity=False))
    def test_no_number_of_the_format_is_nearer(self, fmt: Format, x: float) -> None:
        rounded = round_to(f64(x), fmt).item()
        if abs(x) > fmt.max:
            assert abs(rounded) in (fmt.max, math.inf)
        else:
            assert abs(rounded - x) <= spacing(f64(x), fmt).item() / 2
        assert round_to(f64(rounded), fmt).item() == rounded

    @pytest.mark.parametrize("fmt", [BF16, FP16, TF32, FP32], ids=lambda fmt: fmt.name)
    def test_ties_go_to_even_and_a_hair_decides(self, fmt: Format) -> None:
        u = fmt.unit_roundoff
        points = f64(1 + u, 1 + u + 2.0**-52, 1 + 3 * u, 1 + 3 * u - 2.0**-52)
        assert round_to(points, fmt).tolist() == [1.0, 1 + 2 * u, 1 + 4 * u, 1 + 2 * u]

    def test_a_value_is_not_rounded_by_way_of_fp32(self) -> None:
        x = 1 + 2.0**-8 + 2.0**-40  # by fp32 it becomes a tie, and then 1
        assert round_to(f64(x), BF16).item() == 1 + 2.0**-7

    @any_format
    def test_overflow_begins_half_an_ulp_above_the_maximum(self, fmt: Format) -> None:
        if fmt is FP64:
            assert round_to(f64(fmt.max, math.inf), fmt).tolist() == [fmt.max, math.inf]
            return
        edge = fmt.max * (1 + fmt.unit_roundoff / (2 - 2 * fmt.unit_roundoff))
        inside = math.nextafter(edge, 0.0)
        assert round_to(f64(edge, inside, -edge), fmt).tolist() == [math.inf, fmt.max, -math.inf]

    @any_format
    def test_half_the_least_number_is_a_signed_zero(self, fmt: Format) -> None:
        halves = f64(fmt.smallest_subnormal, -fmt.smallest_subnormal) / 2
        rounded = round_to(halves, fmt)
        assert rounded.tolist() == [0.0, 0.0]
        assert torch.signbit(rounded).tolist() == [False, True]

    @sixteen_bits
    def test_every_number_of_the_format_stays(self, fmt: Format) -> None:
        values = all_values(fmt).double()
        torch.testing.assert_close(round_to(values, fmt), values, rtol=0, atol=0, equal_nan=True)


class TestNeighbours:
    @sixteen_bits
    def test_next_up_walks_through_all_numbers_in_order(self, fmt: Format) -> None:
        values = all_values(fmt)
        ordered = values[~torch.isnan(values)].double().unique().to(fmt.dtype)
        assert torch.equal(next_up(ordered[:-1]), ordered[1:])
        assert torch.equal(next_down(ordered[1:]), ordered[:-1])

    @pytest.mark.parametrize(("fmt", "dtype"), [(FP32, np.float32), (FP64, np.float64)])
    @given(data=st.data())
    def test_they_are_those_of_numpy(self, fmt: Format, dtype: type, data: st.DataObject) -> None:
        x = dtype(data.draw(st.floats(width=32 if fmt is FP32 else 64)))
        tensor = torch.tensor([x], dtype=fmt.dtype)
        with np.errstate(all="ignore"):
            above, below = (np.nextafter(x, dtype(end)) for end in (math.inf, -math.inf))
        np.testing.assert_array_equal(next_up(tensor), [above])
        np.testing.assert_array_equal(next_down(tensor), [below])

    def test_zero_and_the_ends(self) -> None:
        ends = torch.tensor([0.0, -0.0, math.inf, -math.inf])
        least = FP32.smallest_subnormal
        assert next_up(ends).tolist() == [least, least, math.inf, -FP32.max]
        assert next_down(ends).tolist() == [-least, -least, FP32.max, -math.inf]
        assert next_up(torch.tensor(math.nan)).isnan()


class TestBits:
    @sixteen_bits
    def test_all_values_are_all_patterns_in_order(self, fmt: Format) -> None:
        patterns = to_bits(all_values(fmt)).int() & 0xFFFF
        assert torch.equal(patterns, torch.arange(2**16, dtype=torch.int32))

    def test_counts_of_finite_numbers(self) -> None:
        assert torch.isfinite(all_values(BF16)).sum() == 65_280
        assert torch.isfinite(all_values(FP16)).sum() == 63_488

    def test_wider_formats_are_not_listed(self) -> None:
        with pytest.raises(ValueError, match="fp32 has too many values"):
            all_values(FP32)

    def test_patterns_of_another_width_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"torch\.int16, not torch\.int32"):
            from_bits(torch.zeros(1, dtype=torch.int32), torch.float16)

    def test_hand_checked_words(self) -> None:
        assert to_bits(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist() == [0x3F80, -16384]
        assert from_bits(torch.tensor([0x3C01], dtype=torch.int16), torch.float16) == 1 + 2.0**-10
