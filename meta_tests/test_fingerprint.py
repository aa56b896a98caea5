"""Fingerprints: what they hold, what they tell apart, and the limits of their projections."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.audit import fingerprint, sketch, spectrum, trail
from fixtures.audit.parts import Part
from fixtures.numerics import audit_bounds
from fixtures.training.audited import CHANGES, Carrier

N = 3 * sketch.BLOCK + 100


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def taken(full: bool = False, **gradients: Tensor) -> fingerprint.Fingerprint:
    return fingerprint.take(Carrier(gradients), 7, full=full)


class TestSketch:
    @pytest.mark.parametrize("cuts", [[1], [sketch.BLOCK], [5, 5000, 9000], [N - 1]])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_ranges_add_up_to_the_whole(self, cuts: list[int], dtype: torch.dtype) -> None:
        values = gaussian(N).to(dtype)
        sums, checksum = sketch.sums_of(values, 0, "w")
        edges = [0, *cuts, N]
        ranges = [sketch.sums_of(values[a:b], a, "w") for a, b in pairwise(edges)]
        assert sum(int(c) for _, c in ranges) % 2**64 == int(checksum) % 2**64
        limit = audit_bounds.FALSE_ALARM * float(values.double().norm())  # far above float64's
        assert float((sum(s for s, _ in ranges)[1:] - sums[1:]).abs().max()) < limit

    def test_is_linear_and_sign_sensitive(self) -> None:
        g = gaussian(N).double()
        of = [sketch.sums_of(t, 0, "w")[0][1:] for t in (g, -g, 2 * g)]
        assert torch.equal(of[1], -of[0])
        assert torch.equal(of[2], 2 * of[0])

    def test_mean_square_is_the_squared_norm(self) -> None:
        """Over 250 names, so 2000 projections; for one large element, and for a matrix of rank 1
        along the rows, the worst that the signs may meet."""
        spike = torch.zeros(N)
        spike[17] = 3.0
        rank_one = torch.outer(torch.ones(4), gaussian(sketch.BLOCK)).flatten()
        for values in (gaussian(N), spike, rank_one):
            squares = [sketch.sums_of(values, 0, f"w{i}")[0][1:].square() for i in range(250)]
            ratio = float(torch.cat(squares).mean() / values.double().square().sum())
            # kurtosis 9 at most, 2000 draws of which 8 share the columns' signs: 0.28 at 4 sigma
            assert abs(math.log(ratio)) < math.log(4 / 3)

    def test_checksum_sees_one_bit_and_a_moved_block(self) -> None:
        values = gaussian(N)
        other = values.clone()
        other.view(torch.int32)[4] ^= 1
        moved = torch.cat([values[sketch.BLOCK :], values[: sketch.BLOCK]])
        sums = {int(sketch.sums_of(t, 0, "w")[1]) for t in (values, other, moved)}
        assert len(sums) == 3

    def test_limit_of_projections_holds_and_is_not_idle(self) -> None:
        """The root mean square of 8, of 4000 sets: below the limit at 1e-3, above a third of it."""
        limit = audit_bounds.projection(1.0, 8, 1e-3)
        of_one = [float(sketch.sums_of(torch.ones(1), 0, f"w{i}")[0][1]) for i in range(20)]
        assert {abs(value) for value in of_one} == {1.0}
        outer = torch.outer(gaussian(4), gaussian(sketch.BLOCK)).flatten()  # heaviest tail
        size = float(outer.double().norm())
        found = [
            float(sketch.sums_of(outer, 0, f"w{i}")[0][1:].square().mean().sqrt()) / size
            for i in range(400)
        ]
        assert 1 < max(found) < limit


class TestFull:
    def test_sha256_is_of_the_bits(self) -> None:
        g = gaussian(30).bfloat16()
        bits = g.view(torch.int16).numpy().tobytes()
        assert taken(True, w=g).measures["w"].sha256 == hashlib.sha256(bits).hexdigest()

    def test_ties_are_taken_by_index_and_counted(self) -> None:
        g = torch.zeros(100)
        g[torch.arange(10, 90, 2)] = -1.0
        g[95] = 2.0
        measure = taken(True, w=g).measures["w"]
        assert measure.top == (95, *range(10, 10 + 2 * (spectrum.TOP - 1), 2))
        assert measure.tied == 40

    def test_small_tensors_have_all_their_indices(self) -> None:
        measure = taken(True, w=torch.tensor([1.0, -3.0, 2.0])).measures["w"]
        assert measure.top == (1, 2, 0)

    def test_spectrum_is_exact_where_a_side_is_short(self) -> None:
        g = gaussian(16, 40)
        values = torch.linalg.svdvals(g.double()).square()
        got = torch.tensor(taken(True, w=g).measures["w"].spectrum, dtype=torch.float64)
        error = (got - (values / values.sum())[:8]).abs().max()
        assert error < audit_bounds.FALSE_ALARM

    def test_spectrum_of_a_few_large_directions_is_found(self) -> None:
        scales = 10.0 ** -torch.arange(0.0, 200.0).clamp(max=9)
        q, _ = torch.linalg.qr(gaussian(300, 200).double())
        g = q * scales
        got = torch.tensor(taken(True, w=g).measures["w"].spectrum, dtype=torch.float64)
        values = torch.linalg.svdvals(g).square()
        assert (got - (values / values.sum())[:8]).abs().max() < audit_bounds.FALSE_ALARM

    @pytest.mark.parametrize("g", [torch.zeros(3, 4), torch.ones(5), torch.full((2, 2), math.nan)])
    def test_spectrum_is_left_out_where_it_is_undefined(self, g: Tensor) -> None:
        assert taken(True, w=g).measures["w"].spectrum == ()

    def test_an_empty_part_has_nothing(self) -> None:
        part = Part("w", torch.empty(0), 0, torch.Size([0]))
        assert spectrum.top_of(part, None) == ((), 0)


class TestVector:
    @pytest.mark.parametrize("tensors", [1, 5, 128, 129, 300])
    def test_has_256_finite_numbers_for_any_model(self, tensors: int) -> None:
        gradients = {f"w{i}": gaussian(3, 4, seed=i) for i in range(tensors)}
        vector = taken(True, **gradients).vector()
        assert vector.shape == (256,)
        assert vector.isfinite().all()
        norms = vector[: fingerprint.NORMS]
        assert int((norms != 0).sum()) == min(tensors, fingerprint.NORMS)

    def test_norms_of_more_tensors_are_joined(self) -> None:
        gradients = {f"w{i}": torch.full((1,), 3.0 + i % 2) for i in range(256)}  # 3, 4, 3, 4
        assert np.allclose(taken(**gradients).vector()[: fingerprint.NORMS], math.log10(5.0))

    def test_light_tier_has_no_shares(self) -> None:
        assert not taken(w=gaussian(9, 9)).vector()[-fingerprint.SPECTRUM :].any()


class TestCompare:
    @pytest.mark.parametrize(
        ("change", "scale", "nature"),
        [
            ("negated", 1.0, ("sign",)),
            ("times-1.05", 1.05, ("scale",)),
            ("doubled", 2.0, ("scale",)),
            ("rotated", 1.0, ("direction",)),
        ],
    )
    def test_sees_what_was_done_and_where(
        self, change: str, scale: float, nature: tuple[str, ...]
    ) -> None:
        a, b = gaussian(300, 200).double(), gaussian(50, seed=1).double()
        found = fingerprint.compare(taken(a=a, b=b), taken(a=CHANGES[change](a), b=b))
        assert found["b"] == fingerprint.Difference(True, 1.0, 0.0, 0.0)
        assert round(found["a"].scale, 9) == scale
        assert fingerprint.nature(found["a"], 2.0**-24, audit_bounds.FALSE_ALARM) == nature

    def test_small_rotation_is_measured(self) -> None:
        g = gaussian(300, 200).double()
        ratios = []
        for number in range(30):  # other names have other signs
            name = f"w{number}"
            print_ = [taken(**{name: t}) for t in (g, CHANGES["rotated"](g))]
            ratios.append(fingerprint.compare(*print_)[name].error / 1e-3)
        assert 1 / 4 < min(ratios) < 1 < max(ratios) < 4  # sqrt(F) of 8 and 8 degrees: 0.29, 3.5

    def test_zero_and_nonfinite_gradients_do_not_pass_for_equal(self) -> None:
        g, zero, nan = gaussian(5), torch.zeros(5), torch.full((5,), math.nan)
        for left, right in ((g, zero), (zero, g), (g, nan)):
            found = fingerprint.compare(taken(w=left), taken(w=right))["w"]
            assert not found.same_bits
            assert found.projected == math.inf
        assert fingerprint.compare(taken(w=zero), taken(w=-zero))["w"].error == 0

    def test_different_models_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="parameters of one only: a, b"):
            fingerprint.compare(taken(a=gaussian(2)), taken(b=gaussian(2)))

    def test_distances_are_exact(self) -> None:
        g = gaussian(20)
        found = fingerprint.distances(Carrier({"w": g * 3}), {"w": g})["w"]
        assert (found.norm_ratio, found.cosine, found.relative_error) == pytest.approx((3, 1, 2))


def test_takes_nothing_from_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        fingerprint.take(nn.Identity(), 0)


def test_trail_keeps_every_bit(tmp_path: Path) -> None:
    first, again = taken(True, w=gaussian(9, 9)), taken(True, w=gaussian(9, 9, seed=3))
    for one in (first, again):
        trail.append(tmp_path / "trail", one)
    assert trail.read(tmp_path / "trail") == {7: again}
    with (tmp_path / "trail").open("a") as file:
        file.write('{"step": 8, "measu')
    assert list(trail.read(str(tmp_path / "trail"))) == [7]
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="holds no fingerprint"):
        trail.read(tmp_path / "empty")
