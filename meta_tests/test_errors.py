"""Error figures: right on every element, wherever the worst one sits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fixtures.numerics import errors
from fixtures.numerics.errors import ErrorFigures, compare, ulp_distance
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format, all_values, next_up, spacing


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few elements, so that small tensors cross their borders."""
    monkeypatch.setattr(errors, "_CHUNK", 8)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_hand_checked_figures() -> None:
    want = f64(1.0, 2.0, -4.0, 0.0)
    got = torch.tensor([1.0, 2.0 + 2.0**-6, -4.0 - 2.0**-4, 0.0], dtype=torch.bfloat16)
    assert compare(got, want, f64(1.0, 2.0**-6, 2.0**-2, 0.0), BF16) == ErrorFigures(
        count=4,
        worst_index=(1,),
        got=2.0 + 2.0**-6,
        want=2.0,
        max_abs=2.0**-4,
        max_ulp=2.0,
        margin=1.0,
        normwise=math.sqrt(2.0**-12 + 2.0**-8) / math.sqrt(21.0),
        bias=(1.0 - 2.0) / 4,
        nonfinite_mismatches=0,
    )


floats = st.floats(-1e6, 1e6, width=32)


@given(
    pair=hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 40)), elements=floats),
    scale=st.floats(1e-6, 1e6),
    per_element=st.booleans(),
)
def test_figures_are_those_of_the_definition(
    pair: np.ndarray, scale: float, per_element: bool
) -> None:
    got, want = (torch.from_numpy(row.copy()) for row in pair)
    limit = scale * (1.0 + torch.arange(len(want), dtype=torch.float64)) if per_element else scale
    figures = compare(got, want, limit, FP32)
    error = got.double() - want.double()
    ulps = error / spacing(want.double(), FP32)
    ratio = error.abs() / limit
    assert figures.max_abs == error.abs().max()
    assert figures.max_ulp == ulps.abs().max()
    assert figures.margin == pytest.approx(ratio.max().item(), rel=1e-15)
    assert ratio[figures.worst_index].item() == pytest.approx(figures.margin, rel=1e-15)
    assert figures.got == got[figures.worst_index]
    assert figures.want == want[figures.worst_index]
    assert figures.bias == pytest.approx(ulps.mean().item(), rel=1e-9, abs=1e-9)
    norm = want.double().norm().item()
    assert figures.normwise == pytest.approx(
        error.norm().item() / norm if norm else (math.inf if error.any() else 0.0), rel=1e-12
    )


@pytest.mark.parametrize("place", [0, 7, 8, 15, 29])
def test_one_wrong_element_is_found_wherever_it_is(place: int) -> None:
    want = torch.linspace(1.0, 2.0, 30).reshape(5, 6)
    got = want.clone()
    got.view(-1)[place] = next_up(want.view(-1)[place])
    figures = compare(got, want, 0.0, FP32)
    assert figures.worst_index == (place // 6, place % 6)
    assert figures.max_ulp == 1.0
    assert figures.margin == math.inf
    distance = ulp_distance(got, want)
    assert (distance.worst_index, distance.max_ulp) == (figures.worst_index, 1.0)


class TestLimits:
    def test_zero_over_zero_is_zero_and_the_rest_infinite(self) -> None:
        assert compare(f64(1.0, 2.0), f64(1.0, 2.0), 0.0, FP64).margin == 0.0
        assert compare(f64(1.0, 3.0), f64(1.0, 2.0), f64(0.0, 2.0), FP64).margin == 0.5
        assert compare(f64(1.5, 2.0), f64(1.0, 2.0), f64(0.0, 1.0), FP64).margin == math.inf

    def test_a_limit_broadcasts(self) -> None:
        want = torch.zeros(4, 3, dtype=torch.float64)
        got = torch.ones(4, 3)
        figures = compare(got, want, f64(1.0, 0.25, 2.0), FP32)
        assert figures.margin == 4.0
        assert figures.worst_index == (0, 1)
        assert compare(got, want, f64(1.0, 2.0, 0.125, 4.0)[:, None], FP32).worst_index == (2, 0)
        assert compare(got, want, torch.tensor(0.5, dtype=torch.float64), FP32).margin == 2.0

    def test_a_limit_that_does_not_broadcast_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"limit of shape \(2,\) does not broadcast .* \(3,\)"):
            compare(torch.ones(3), torch.ones(3), f64(1.0, 1.0), FP32)

    @pytest.mark.parametrize("limit", [-1.0, math.nan, f64(1.0, math.nan, 1.0)])
    def test_a_limit_that_bounds_nothing_is_refused(self, limit: float | torch.Tensor) -> None:
        with pytest.raises(ValueError, match="negative or NaN"):
            compare(torch.ones(3), torch.ones(3), limit, FP32)

    def test_shapes_must_agree(self) -> None:
        with pytest.raises(ValueError, match=r"got has shape \(3,\), want \(1, 3\)"):
            compare(torch.ones(3), torch.ones(1, 3), 0.0, FP32)

    def test_integers_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no floating-point format torch\.int64"):
            compare(torch.ones(3, dtype=torch.int64), torch.ones(3), 0.0, FP32)


INF, NAN = math.inf, math.nan


class TestNonFinite:
    @pytest.mark.parametrize(
        ("got", "want", "matches"),
        [
            (NAN, NAN, True),
            (INF, INF, True),
            (-INF, -INF, True),
            (INF, -INF, False),
            (NAN, INF, False),
            (INF, NAN, False),
            (1.0, NAN, False),
            (1.0, INF, False),
            (NAN, 1.0, False),
            (INF, 1.0, False),
            (FP32.max, INF, False),
            (-0.0, 0.0, True),
        ],
    )
    @pytest.mark.parametrize("place", [0, 11])
    def test_only_like_matches_like(
        self, got: float, want: float, matches: bool, place: int
    ) -> None:
        a, b = torch.ones(12), torch.ones(12)
        a[place], b[place] = got, want
        figures = compare(a, b, 1e30, FP32)
        distance = ulp_distance(a, b)
        assert figures.nonfinite_mismatches == distance.nonfinite_mismatches == (not matches)
        assert figures.margin == distance.max_ulp == (0.0 if matches else INF)
        assert matches or figures.worst_index == distance.worst_index == (place,)

    def test_other_elements_are_still_measured(self) -> None:
        figures = compare(f64(NAN, 3.0, INF), f64(NAN, 2.0, INF), 4.0, FP64)
        assert (figures.max_abs, figures.margin, figures.worst_index) == (1.0, 0.25, (1,))
        assert figures.normwise == 0.5
        assert figures.bias == 2.0**51

    def test_the_first_mismatch_is_the_worst_and_all_are_counted(self) -> None:
        got, want = torch.ones(20), torch.ones(20)
        got[[3, 4, 19]] = NAN
        got[0] = 5.0
        figures = compare(got, want, 1e-3, FP32)
        assert figures.worst_index == (3,)
        assert figures.nonfinite_mismatches == 3
        assert ulp_distance(got, want).nonfinite_mismatches == 3
        assert ulp_distance(got, want).worst_index == (3,)


def test_empty_and_0d_tensors() -> None:
    empty = torch.empty(0, 4)
    assert compare(empty, empty, 0.0, FP32).margin == 0.0
    assert compare(empty, empty, 0.0, FP32).count == ulp_distance(empty, empty).count == 0
    one = torch.tensor(1.0)
    assert compare(next_up(one), one, 2.0**-23, FP32).margin == 1.0
    assert ulp_distance(next_up(one), one).worst_index == ()


def test_strided_and_differentiable_tensors_are_measured() -> None:
    want = torch.arange(24, dtype=torch.float64).reshape(4, 6).T
    got = want.float().requires_grad_()
    assert compare(got, want, 0.0, FP32).margin == 0.0
    assert compare(got + want.eq(9.0), want, 1.0, FP32).worst_index == (3, 1)


class TestUlpDistance:
    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=["bf16", "fp16"])
    def test_distance_is_the_difference_of_ranks(self, fmt: Format) -> None:
        values = all_values(fmt)
        finite = values[torch.isfinite(values)]
        rank = {x: i for i, x in enumerate(finite.double().unique().tolist())}
        generator = np.random.default_rng(7)
        for a, b in finite[generator.integers(0, len(finite), (300, 2))]:
            wanted = abs(rank[a.item()] - rank[b.item()])
            assert ulp_distance(a[None], b[None]).max_ulp == wanted

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_across_zero_and_over_the_whole_range(self, dtype: torch.dtype) -> None:
        largest = torch.finfo(dtype).max
        least = next_up(torch.zeros(1, dtype=dtype))
        assert ulp_distance(least, -least).max_ulp == 2.0
        assert ulp_distance(torch.zeros_like(least), -torch.zeros_like(least)).max_ulp == 0.0
        ends = torch.tensor([largest], dtype=dtype)
        width = 31 if dtype == torch.float32 else 63
        precision = 24 if dtype == torch.float32 else 53
        assert ulp_distance(ends, -ends).max_ulp == 2.0 * (2.0**width - 2.0 ** (precision - 1) - 1)

    def test_a_nan_a_step_from_the_largest_number_is_a_mismatch(self) -> None:
        nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
        assert ulp_distance(torch.tensor([FP32.max]), nan).nonfinite_mismatches == 1
        assert ulp_distance(nan, torch.tensor([FP32.max])).nonfinite_mismatches == 1

    def test_dtypes_must_agree(self) -> None:
        with pytest.raises(ValueError, match=r"float32 with .* torch\.float64"):
            ulp_distance(torch.ones(1), torch.ones(1, dtype=torch.float64))
