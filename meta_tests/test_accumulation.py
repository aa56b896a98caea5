"""What surrounds a matrix unit: how K is divided, what follows the sums, how wrong they can be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.hardware_models import unit_bounds
from fixtures.hardware_models.accumulation import SEQUENTIAL, Accumulation, SliceK, SplitK
from fixtures.hardware_models.epilogue import Epilogue
from fixtures.hardware_models.matrix_units import matmul
from fixtures.hardware_models.units import GPUS, MatrixUnit
from fixtures.numerics.bounds import Bound
from fixtures.numerics.formats import BF16
from precision_tests.test_hardware_models_matrix_units import UNITS, blocks_of, spread

A100 = GPUS["A100"].units["bf16"]


def operands(k: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return spread((4, k), BF16, 1, 3), spread((k, 5), BF16, 2, 3)


class TestAccumulation:
    @given(
        k=st.integers(1, 200),
        block=st.sampled_from([4, 8, 16]),
        accumulation=st.one_of(
            st.just(SEQUENTIAL),
            st.builds(SplitK, st.integers(1, 9)),
            st.builds(SliceK, st.integers(1, 9), st.sampled_from([16, 32])),
        ),
    )
    def test_every_product_is_taken_once(
        self, k: int, block: int, accumulation: Accumulation
    ) -> None:
        parts = accumulation.parts(k, block)
        places = [place for part in parts for piece in part for place in piece]
        assert sorted(places) == list(range(k))
        whole = [piece for part in parts for piece in part if piece.stop != k]
        assert all(len(piece) % block == 0 for piece in whole)

    def test_split_k_adds_chains_in_fp32(self) -> None:
        a, b = operands()
        quarters = [matmul(a[:, i : i + 16], b[i : i + 16], gpu="A100") for i in (0, 16, 32, 48)]
        w, x, y, z = quarters
        for order, expected in {
            "ascending": ((w + x) + y) + z,
            "descending": ((z + y) + x) + w,
            "pairwise": (w + x) + (y + z),
        }.items():
            split = SplitK(4, order=order)  # type: ignore[arg-type]
            assert torch.equal(matmul(a, b, gpu="A100", accumulation=split), expected)

    def test_partial_sums_may_be_stored_in_16_bits(self) -> None:
        a, b = operands()
        halves = [matmul(a[:, i : i + 32], b[i : i + 32], gpu="A100") for i in (0, 32)]
        stored = [half.bfloat16().float() for half in halves]
        partial = SplitK(2, partial_dtype=torch.bfloat16)
        found = matmul(a, b, gpu="A100", accumulation=partial)
        assert torch.equal(found, stored[0] + stored[1])
        both = SplitK(2, partial_dtype=torch.bfloat16, sum_dtype=torch.bfloat16)
        found = matmul(a, b, gpu="A100", accumulation=both)
        assert torch.equal(found, (stored[0] + stored[1]).bfloat16().float())

    def test_slice_k_takes_turns(self) -> None:
        a, b = operands()
        turns = [torch.arange(16).add(i) for i in (0, 16, 32, 48)]
        places = [torch.cat(turns[i::2]) for i in (0, 1)]
        first, second = (matmul(a[:, p], b[p], gpu="A100") for p in places)
        found = matmul(a, b, gpu="A100", accumulation=SliceK(2, 16))
        assert torch.equal(found, first + second)

    def test_the_addend_starts_the_first_chain_only(self) -> None:
        a, b = operands()
        c = spread((4, 5), BF16, 3, 3).float()
        first = matmul(a[:, :32], b[:32], c, gpu="A100")
        found = matmul(a, b, c, gpu="A100", accumulation=SplitK(2))
        assert torch.equal(found, first + matmul(a[:, 32:], b[32:], gpu="A100"))

    def test_what_cannot_be_meant_is_refused(self) -> None:
        with pytest.raises(ValueError, match="partitions is at least 1"):
            SplitK(0)
        with pytest.raises(ValueError, match="order is ascending"):
            SliceK(2, order="random")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no multiple of the unit's block of 8"):
            matmul(*operands(), gpu="A100", accumulation=SliceK(2, 12))


class TestEpilogue:
    def test_is_done_in_fp32_and_rounded_once(self) -> None:
        a, b = operands()
        source, bias = spread((4, 5), BF16, 4, 3), spread((5,), BF16, 5, 3)
        sums = matmul(a, b, gpu="H100")
        done = Epilogue(alpha=0.3, beta=0.7, source=source, bias=bias)
        found = matmul(a, b, gpu="H100", epilogue=done, out_dtype=torch.bfloat16)
        expected = sums * 0.3 + source.float() * 0.7 + bias.float()
        assert torch.equal(found, expected.bfloat16())

    def test_without_one_the_cast_is_the_only_rounding(self) -> None:
        a, b = operands()
        found = matmul(a, b, gpu="H100", out_dtype=torch.bfloat16)
        assert torch.equal(found, matmul(a, b, gpu="H100").bfloat16())

    def test_what_cannot_be_meant_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"beta = 2 needs a source"):
            Epilogue(beta=2.0)
        wrong = Epilogue(bias=torch.ones(3, 4, 5))
        with pytest.raises(ValueError, match=r"do not broadcast to \(4, 5\)"):
            matmul(*operands(), gpu="H100", epilogue=wrong)


class TestBounds:
    """Each bound holds, and at least half of it is reached."""

    def margin(self, got: torch.Tensor, want: torch.Tensor, bound: Bound) -> float:
        return ((got.double() - want).abs() / bound.limit).max().item()

    @pytest.mark.parametrize("unit", UNITS)
    def test_one_block(self, unit: MatrixUnit) -> None:
        a, b, c = blocks_of(unit)
        got = matmul(a.unsqueeze(1), b.unsqueeze(2), c.view(-1, 1, 1), gpu=unit).flatten()
        want = (a.double() * b.double()).sum(-1) + c.double()
        alignment = unit_bounds.alignment_exponent(a, b, c, unit)
        margin = self.margin(got, want, unit_bounds.one_block(alignment, got, unit))
        assert 0.5 < margin <= 1.0

    @pytest.mark.parametrize("unit", UNITS)
    def test_a_chain(self, unit: MatrixUnit) -> None:
        """A large addend, and blocks each of which is lost as a whole."""
        a, b, c = (x[-1:] for x in blocks_of(unit))
        a, b = a.repeat(1, 40), b.repeat(1, 40).T
        got = matmul(a, b, c.view(1, 1), gpu=unit)
        terms = a.double() @ b.double()
        bound = unit_bounds.chain_of_blocks(terms + c.double(), a.shape[1], unit)
        margin = self.margin(got, terms + c.double(), bound)
        assert 0.5 < margin <= 1.0

    @given(st.sampled_from([unit.values[0] for unit in UNITS]), st.integers(0, 2**31))
    def test_a_chain_of_drawn_numbers(self, unit: MatrixUnit, seed: int) -> None:
        octaves = min(6, -unit.inputs.emin // 2)
        a, b = (
            spread((4, 70), unit.inputs, seed, octaves),
            spread((70, 4), unit.inputs, seed + 1, 1),
        )
        sum_of_abs = a.double().abs() @ b.double().abs()
        bound = unit_bounds.chain_of_blocks(sum_of_abs, 70, unit)
        got = matmul(a, b, gpu=unit)
        assert self.margin(got, a.double() @ b.double(), bound) <= 1.0

    def test_a_unit_that_keeps_a_bit_less_breaks_the_bound_of_one_block(self) -> None:
        a, b, c = blocks_of(A100)
        worse = replace(A100, fraction_bits=A100.fraction_bits - 2)
        got = matmul(a.unsqueeze(1), b.unsqueeze(2), c.view(-1, 1, 1), gpu=worse).flatten()
        want = (a.double() * b.double()).sum(-1) + c.double()
        alignment = unit_bounds.alignment_exponent(a, b, c, A100)
        assert self.margin(got, want, unit_bounds.one_block(alignment, got, A100)) > 1.0

    def test_a_bound_with_the_unit_roundoff_of_fp32_would_not_hold(self) -> None:
        """Non-negative data: truncation is a bias, and 2^-24 per block is too little."""
        a, b, c = (x[-1:] for x in blocks_of(A100))
        a, b = a.repeat(1, 40), b.repeat(1, 40).T
        got = matmul(a, b, c.view(1, 1), gpu=A100).item()
        want = (a.double() @ b.double()).item() + c.item()
        assert abs(got - want) > 40 * math.ldexp(want, -24)


@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        ("V100", torch.float16, "-9.0e-05"),
        ("A100", torch.float16, "-5.0e-05"),
        ("H100", torch.float16, "-2.6e-05"),
        ("A100", torch.bfloat16, "-3.2e-05"),
        ("H100", torch.bfloat16, "-1.4e-05"),
    ],
)
def test_the_bias_of_long_sums(gpu: str, dtype: torch.dtype, expected: str) -> None:
    """|N(0, 1)| data, K = 4096: the mean relative error that docs/hardware_models.md states."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 4096), (4096, 64))
    a, b = (torch.randn(s, generator=generator).abs().to(dtype) for s in shapes)
    want = a.double() @ b.double()
    assert f"{((matmul(a, b, gpu=gpu) - want) / want).mean().item():.1e}" == expected
