"""The model of matrix units: against a second one in rational numbers, and at its edges."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fixtures.hardware_models import block_sums
from fixtures.hardware_models.epilogue import Epilogue
from fixtures.hardware_models.matrix_units import UnmeasuredRangeWarning, matmul, to_tf32
from fixtures.hardware_models.units import (
    E8M13,
    GPUS,
    INPUT_DTYPES,
    Gpu,
    MatrixUnit,
    unit_of,
)
from fixtures.numerics.formats import BF16, FP16, FP32, TF32
from meta_tests.rational_units import as_float, dot_add

UNITS = {f"{gpu}-{fmt}": unit for gpu in GPUS for fmt, unit in GPUS[gpu].units.items()}
UNITS |= {
    f"{name}-to-fp16": unit.with_fp16_output() for name, unit in UNITS.items() if "fp16" in name
}
UNITS |= {
    "own-block-of-3": MatrixUnit(BF16, 3, 24),
    "own-nearest": MatrixUnit(FP16, 16, 30, rounding="nearest-even"),
    "own-wide": MatrixUnit(TF32, 20, 40),
    "own-truncating-fp16": MatrixUnit(FP16, 4, 23, FP16),
}
NAN_BITS = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def by_rationals(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, unit: MatrixUnit
) -> torch.Tensor:
    """(M, N) in the unit's output dtype; NaNs canonical."""
    rows = []
    for m, n in ((m, n) for m in range(a.shape[0]) for n in range(b.shape[1])):
        found = dot_add(
            a[m].double().tolist(),
            b[:, n].double().tolist(),
            c[m, n].item(),
            inputs=unit.inputs.name,
            products=unit.block,
            fraction_bits=unit.fraction_bits,
            output_bits=unit.output.precision,
            output_emin=unit.output.emin,
            output_emax=unit.output.emax,
            nearest=unit.rounding == "nearest-even",
        )
        rows.append(as_float(found))
    result = torch.tensor(rows, dtype=torch.float64).to(unit.output_dtype).reshape(c.shape)
    nan = torch.tensor(NAN_BITS[result.dtype], dtype=bits(result).dtype).view(result.dtype)
    return torch.where(result.isnan(), nan, result)


def modelled(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, unit: MatrixUnit) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmeasuredRangeWarning)
        return matmul(a, b, c, gpu=unit, out_dtype=unit.output_dtype)


@st.composite
def numbers(
    draw: st.DrawFn, count: int, unit: MatrixUnit, precision: int, span: int
) -> list[float]:
    """Numbers of up to ``precision`` bits whose exponents lie within ``span`` of each other."""
    low, high = unit.inputs.emin - 8, unit.inputs.emax + 1
    centre = draw(st.integers(low, high))
    mantissas = st.integers(-(2**precision) + 1, 2**precision - 1)
    offsets = st.integers(-span, span)
    special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])
    ordinary = st.builds(lambda m, e: math.ldexp(m, centre + e - precision + 1), mantissas, offsets)
    rarely = st.integers(0, 40).flatmap(lambda i: special if i == 0 else ordinary)
    elements = draw(st.sampled_from([ordinary, ordinary, rarely]))
    return draw(st.lists(elements, min_size=count, max_size=count))


@st.composite
def sums(draw: st.DrawFn) -> tuple[MatrixUnit, torch.Tensor, torch.Tensor, torch.Tensor]:
    unit = UNITS[draw(st.sampled_from(sorted(UNITS)))]
    count = draw(st.integers(1, 2 * unit.block + 1))
    span = draw(st.sampled_from([0, 3, 12, 30]))
    precision = unit.inputs.precision
    factors = [
        torch.tensor(draw(numbers(count, unit, precision, span)), dtype=torch.float64)
        for _ in range(2)
    ]
    a, b = (x.to(INPUT_DTYPES[unit.inputs.name]) for x in factors)
    if unit.inputs == TF32:
        a, b = to_tf32(a), to_tf32(b)
    size = (a.double().abs() * b.double().abs()).nan_to_num(posinf=0.0).max().clamp(max=1e38)
    relative = draw(st.floats(-4, 4, width=32) | st.just(0.0))
    c = (size * relative).to(unit.output_dtype).reshape(1, 1)
    return unit, a.reshape(1, -1), b.reshape(-1, 1), c


@given(sums())
def test_agrees_with_rational_numbers(
    drawn: tuple[MatrixUnit, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    unit, a, b, c = drawn
    assert torch.equal(bits(modelled(a, b, c, unit)), bits(by_rationals(a, b, c, unit)))


def spread(shape: tuple[int, ...], unit: MatrixUnit, seed: int, octaves: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-octaves, octaves + 1, shape, generator=generator).float())
    x = torch.randn(shape, generator=generator) * scale
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return to_tf32(x) if unit.inputs == TF32 else x.to(INPUT_DTYPES[unit.inputs.name])


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
@pytest.mark.parametrize("octaves", [1, 6, 14])
def test_a_matrix_agrees_with_rational_numbers(unit: MatrixUnit, octaves: int) -> None:
    octaves = min(octaves, -unit.inputs.emin // 2)
    k = 2 * unit.block + 3
    a, b = spread((3, k), unit, 1, octaves), spread((k, 4), unit, 2, octaves)
    c = spread((3, 4), UNITS["A100-tf32"], 3, octaves).to(unit.output_dtype)
    assert torch.equal(bits(modelled(a, b, c, unit)), bits(by_rationals(a, b, c, unit)))


class TestPaths:
    """The fast path and the general one, over more than one tile."""

    @pytest.mark.parametrize(
        "shapes", [((70, 37), (37, 600)), ((1, 40), (40, 5)), ((5, 9), (9, 1))]
    )
    @pytest.mark.parametrize("name", ["V100-fp16", "A100-bf16", "H100-tf32", "H100-e4m3"])
    def test_give_the_same_bits(
        self,
        name: str,
        shapes: tuple[tuple[int, int], tuple[int, int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        unit = UNITS[name]
        a, b = spread(shapes[0], unit, 4, 4), spread(shapes[1], unit, 5, 4)
        c = torch.randn(a.shape[0], b.shape[1], generator=torch.Generator().manual_seed(6))
        assert block_sums._shifts(a.float()[None], b.float()[None], c[None], unit) is not None
        fast = matmul(a, b, c, gpu=unit)
        monkeypatch.setattr(block_sums, "_shifts", lambda *_: None)
        assert torch.equal(bits(fast), bits(matmul(a, b, c, gpu=unit)))

    @given(seed=st.integers(0, 2**31), octaves=st.integers(0, 34), down=st.integers(0, 60))
    @example(seed=0, octaves=0, down=0)
    def test_the_fast_one_is_taken_only_where_it_is_exact(
        self, seed: int, octaves: int, down: int
    ) -> None:
        unit = UNITS["H100-bf16"]
        a = spread((4, 33), unit, seed, octaves) * 2.0**-down
        b = spread((33, 4), unit, seed + 1, octaves) * 2.0 ** (down // 2)
        c = spread((4, 4), UNITS["A100-tf32"], seed + 2, octaves)
        taken = block_sums._shifts(a.float()[None], b.float()[None], c[None], unit)
        if taken is not None:
            left, right = (block_sums._operand(x.float()[None], unit, None) for x in (a, b))
            general, _ = block_sums._general(left, right, c[None].double(), unit)
            assert torch.equal(bits(matmul(a, b, c, gpu=unit)), bits(general[0].float()))


class TestSpecialValues:
    """One product a b, one addend: what IEEE arithmetic says, with the unit's own NaN."""

    @pytest.mark.parametrize(
        ("a", "b", "c", "expected"),
        [
            (math.inf, 1.0, 0.0, 0x7F800000),
            (math.inf, -1.0, 0.0, 0xFF800000),
            (math.inf, 0.0, 0.0, 0x7FFFFFFF),
            (math.nan, 1.0, 0.0, 0x7FFFFFFF),
            (-math.nan, 1.0, 0.0, 0x7FFFFFFF),
            (1.0, 1.0, math.nan, 0x7FFFFFFF),
            (1.0, 1.0, -math.inf, 0xFF800000),
            (math.inf, 1.0, -math.inf, 0x7FFFFFFF),
            (math.inf, 1.0, math.inf, 0x7F800000),
            # Sums that vanish are +0, whatever the signs; the unit has no other zero.
            (0.0, -1.0, -0.0, 0x00000000),
            (1.0, 1.0, -1.0, 0x00000000),
            (2.0**-133, 2.0**-1, -(2.0**-134), 0x00000000),
            # A negative sum that is truncated to nothing keeps its sign.
            (-(2.0**-75), 2.0**-75, 0.0, 0x80000000),
            (2.0**-75, 2.0**-75, 0.0, 0x00000000),
            (2.0**-75, 2.0**-74, 0.0, 0x00000001),
            (2.0**-133, 1.0, 0.0, 0x00010000),
            # The greatest fp32 number, and the first sum that is infinite.
            (2.0**64 * 1.9921875, 2.0**63, float(2**127 - 2**103), 0x7F800000),
            (1.0, 1.0, float(2**128 - 2**104), 0x7F7FFFFF),
            (2.0**64, 2.0**64, 0.0, 0x7F800000),
            (2.0**64, -(2.0**64), 0.0, 0xFF800000),
        ],
    )
    @pytest.mark.parametrize("gpu", ["A100", "H100"])
    def test_of_bf16(self, gpu: str, a: float, b: float, c: float, expected: int) -> None:
        left, right = (torch.tensor([[x]], dtype=torch.bfloat16) for x in (a, b))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnmeasuredRangeWarning)
            found = matmul(left, right, torch.tensor([[c]]), gpu=gpu)
        assert bits(found).item() & 0xFFFFFFFF == expected

    def test_overflow_within_a_chain_stays(self) -> None:
        a = torch.full((1, 24), 2.0**64, dtype=torch.bfloat16)
        b = a.T.clone()
        b[8:] *= -1.0  # the first block of 8 is +inf, and finite sums do not bring it back
        assert matmul(a, b, gpu="A100").item() == math.inf
        b[20] = -math.inf
        assert matmul(a, b, gpu="A100").isnan().all()

    def test_products_beyond_the_range_that_cancel_are_no_overflow(self) -> None:
        a = torch.tensor([[2.0**100, 2.0**100, 1.0]], dtype=torch.bfloat16)
        b = torch.tensor([[2.0**100], [-(2.0**100)], [1.0]], dtype=torch.bfloat16)
        assert matmul(a, b, gpu="A100").item() == 0.0

    def test_fp16_accumulators_round_to_nearest_and_overflow_there(self) -> None:
        def found(value: float, addend: float) -> float:
            one = torch.ones(1, 1, dtype=torch.float16)
            c = torch.tensor([[addend]], dtype=torch.float16)
            b = torch.tensor([[value]], dtype=torch.float16)
            return matmul(one, b, c, gpu="A100", accumulator=torch.float16).item()

        assert found(2.0**-11, 1.0) == 1.0  # a tie, to even
        assert found(2.0**-11 * 1.5, 1.0) == 1.0 + 2.0**-10
        assert found(15.0, 65504.0) == 65504.0
        assert found(16.0, 65504.0) == math.inf

    def test_fp8_units_of_hopper_return_13_bits(self) -> None:
        a = torch.tensor([[1.0, 2.0**-6]]).to(torch.float8_e4m3fn)
        b = torch.tensor([[1.0], [2.0**-8 * 1.5]]).to(torch.float8_e4m3fn)
        assert b[1].item() == 2.0**-8 * 1.5
        assert matmul(a, b, gpu="H100").item() == 1.0  # 1.5 2^-14 lies below 13 bits
        assert E8M13.precision == 14


@pytest.mark.parametrize("name", ["H100-bf16", "H100-fp16"])
def test_a_fault_of_one_bit_shows(name: str) -> None:
    unit = UNITS[name]
    a, b = spread((16, 64), unit, 7, 3), spread((64, 16), unit, 8, 3)
    right = matmul(a, b, gpu=unit)
    for wrong in (
        replace(unit, fraction_bits=unit.fraction_bits - 1),
        replace(unit, block=unit.block // 2),
        replace(unit, rounding="nearest-even"),
    ):
        assert not torch.equal(right, matmul(a, b, gpu=wrong))


class TestArguments:
    def test_batches_broadcast(self) -> None:
        a, b = torch.randn(2, 1, 3, 20).half(), torch.randn(5, 20, 4).half()
        c = torch.randn(5, 1, 4)
        found = matmul(a, b, c, gpu="H100")
        assert found.shape == (2, 5, 3, 4)
        for i, j in ((0, 0), (1, 3)):
            alone = matmul(a[i, 0], b[j], c[j].expand(3, 4), gpu="H100")
            assert torch.equal(found[i, j], alone)
        shared = torch.randn(20, 4).half()
        rows = matmul(a, shared, gpu="H100")
        assert torch.equal(rows[1, 0], matmul(a[1, 0], shared, gpu="H100"))

    @pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
    def test_empty_matrices(self, shape: tuple[int, int, int]) -> None:
        m, k, n = shape
        a, b, c = torch.ones(m, k).half(), torch.ones(k, n).half(), torch.ones(m, n)
        assert matmul(a, b, gpu="A100").shape == (m, n)
        assert torch.equal(matmul(a, b, c, gpu="A100"), c + k)

    def test_a_gpu_of_ones_own(self) -> None:
        unit = MatrixUnit(FP16, 2, 24)
        a, b = torch.ones(1, 4).half() * 2.0**-12, torch.ones(4, 1).half() * 2.0**-12
        c = torch.ones(1, 1)
        own = Gpu("Z1", {"fp16": unit})
        assert matmul(a, b, c, gpu=own).item() == matmul(a, b, c, gpu=unit).item() == 1.0 + 2.0**-22

    def test_results_have_no_gradient_and_inputs_stay(self) -> None:
        a = torch.randn(4, 32).bfloat16().requires_grad_()
        before = a.detach().clone()
        c = torch.zeros(4, 4)
        bias = Epilogue(bias=torch.zeros(4, requires_grad=True))
        assert not matmul(a, a.T, c, gpu="H100", epilogue=bias).requires_grad
        assert torch.equal(a, before)
        assert not c.any()

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"gpu": "H300"}, ValueError, "known are: V100, A100, L40S, H100, H200, B200"),
            ({"gpu": "V100", "dtype": torch.bfloat16}, ValueError, "it has: fp16"),
            ({"dtype": torch.float64}, TypeError, "they take: torch.float16"),
            ({"gpu": MatrixUnit(BF16, 8, 24)}, TypeError, "this unit multiplies bf16"),
            ({"shape": (3, 5)}, ValueError, r"\(2, 4\) and \(3, 5\)"),
            ({"shape": (4,)}, ValueError, r"\(2, 4\) and \(4,\)"),
            ({"other": torch.bfloat16}, TypeError, "a and b have one dtype"),
            ({"c": torch.zeros(7, 7)}, ValueError, r"c has shape \(7, 7\)"),
            ({"c": torch.zeros(2, 5).double()}, TypeError, "round it to that first"),
            ({"c": torch.zeros(2, 5).int()}, TypeError, "round it to that first"),
            ({"accumulation": "split-k"}, TypeError, "Sequential, SplitK or SliceK"),
            ({"c": torch.zeros(2, 5), "accumulator": torch.float16}, TypeError, "round it"),
            ({"accumulator": torch.bfloat16}, TypeError, "accumulator is torch.float32 or"),
            ({"accumulator": torch.float16, "dtype": torch.bfloat16}, ValueError, "only fp16"),
            ({"dtype": torch.float32, "tf32_input": "floor"}, ValueError, "truncate or round"),
            ({"out_dtype": torch.int32}, TypeError, "out_dtype is a floating-point dtype"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(
        self, arguments: dict[str, object], error: type[Exception], message: str
    ) -> None:
        dtype = arguments.pop("dtype", torch.float16)
        a = torch.zeros(2, 4, dtype=dtype)  # type: ignore[call-overload]
        b = torch.zeros(arguments.pop("shape", (4, 5)), dtype=arguments.pop("other", dtype))  # type: ignore[call-overload]
        with pytest.raises(error, match=message):
            matmul(a, b, **{"gpu": "A100", **arguments})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"inputs": FP32}, "takes no fp32"),
            ({"block": 0}, "block"),
            ({"fraction_bits": 60}, "fraction_bits"),
            ({"rounding": "up"}, "rounding is"),
            ({"lowest_exponent": 3}, "lowest_exponent"),
            ({"block": 4.5}, "block is an integer"),
        ],
    )
    def test_a_unit_that_cannot_be(self, arguments: dict[str, object], message: str) -> None:
        described = {"inputs": FP16, "block": 4, "fraction_bits": 24, **arguments}
        with pytest.raises(ValueError, match=message):
            MatrixUnit(**described)  # type: ignore[arg-type]

    def test_units_are_looked_up(self) -> None:
        assert unit_of("H200", torch.float32).block == 8
        assert unit_of("A100", torch.float16, torch.float16).output == FP16


def test_tf32_input_is_truncated_or_rounded_with_ties_away() -> None:
    x = torch.tensor(
        [1.0 + 2.0**-11, -1.0 - 2.0**-11, 1.0 + 2.0**-12, math.inf, 3.4028e38, 2.0**-149]
    )
    one, ulp = 1.0, 2.0**-10
    assert to_tf32(x).tolist()[:4] == [one, -one, one, math.inf]
    assert to_tf32(x, "round").tolist() == [one + ulp, -one - ulp, one, math.inf, math.inf, 0.0]
    assert to_tf32(torch.tensor([math.nan]), "round").isnan().all()


class TestUnmeasuredRange:
    tiny = torch.full((1, 8), 2.0**-60, dtype=torch.bfloat16)

    def test_is_warned_of_once_a_call(self) -> None:
        with pytest.warns(UnmeasuredRangeWarning, match=r"below 2\^-100") as caught:
            matmul(self.tiny, self.tiny.T, gpu="A100")
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_not_where_the_small_products_stand_beside_greater_ones(self) -> None:
        a = self.tiny.clone()
        a[0, 0] = 1.0
        b = self.tiny.T.clone()
        b[0] = 1.0
        assert matmul(a, b, gpu="A100").item() == 1.0
        assert matmul(self.tiny, self.tiny.T, torch.ones(1, 1), gpu="A100").item() == 1.0
