"""Hardware models: do they compute what the hardware computes?

On the CPU (mark ``models``) the model of the matrix units is held to results worked out by hand,
to those recorded on hardware (``--hardware-vectors=FILE``), and to its own a-priori bounds. On a
GPU the device's matrix unit is held to the model, bit for bit: for one block, where no choice of a
kernel has a say, and for long sums, where the order that the kernel adds in is found by probing.

Sources: arXiv 2511.10909, arXiv 2512.07004, PeerJ CS 7:e330; arXiv 2411.00442 for the probing. The
mechanism, and what of it is verified: docs/hardware_models.md.
"""

from __future__ import annotations

import pytest
import torch

from fixtures import stash, switches
from fixtures.check import Check
from fixtures.devices import Device
from fixtures.hardware_models import kernel_orders, recorded, revealing, unit_bounds
from fixtures.hardware_models.accumulation import SEQUENTIAL, Accumulation
from fixtures.hardware_models.matrix_units import Tf32Input, matmul, to_tf32
from fixtures.hardware_models.recorded import Recorded
from fixtures.hardware_models.units import GPUS, INPUT_DTYPES, MatrixUnit
from fixtures.numerics.formats import BF16, FP16, FP32, TF32, Format
from fixtures.unjudged import Unjudged

UNITS = [
    pytest.param(unit, id=f"{gpu}-{name}")
    for gpu in ("V100", "A100", "L40S", "H100")
    for name, unit in GPUS[gpu].units.items()
    if not (gpu == "L40S" and name in GPUS["A100"].units)
]
"""Every unit that differs from the others, by the GPU that had it first."""

PROBED = (FP16, BF16, TF32)
"""The formats in which one number absorbs many others: fp8 units keep too few bits for that."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``results``: those worked out by hand, and those of the file of ``--hardware-vectors``."""
    if "results" in metafunc.fixturenames:
        known = (*recorded.by_hand(), *metafunc.config.stash[stash.RECORDED])
        metafunc.parametrize("results", [pytest.param(one, id=one.name) for one in known])


def spread(shape: tuple[int, ...], fmt: Format, seed: int, octaves: int = 8) -> torch.Tensor:
    """Numbers of a format whose exponents lie 2 ``octaves`` apart, so that alignment loses bits."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-octaves, octaves + 1, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
    if fmt in (TF32, FP32):
        return to_tf32(numbers) if fmt == TF32 else numbers
    return numbers.to(INPUT_DTYPES[fmt.name])


@pytest.mark.models
class TestMatrixUnits:
    def test_results_are_those_known(self, check: Check, results: Recorded) -> None:
        for output, known in results.results.items():
            check.exact(results.predicted(output), known, name=str(output).removeprefix("torch."))

    @pytest.mark.parametrize("unit", UNITS)
    def test_one_block_is_within_its_bound(self, check: Check, unit: MatrixUnit) -> None:
        a, b, c = blocks_of(unit)
        got = matmul(a.unsqueeze(1), b.unsqueeze(2), c.view(-1, 1, 1), gpu=unit).flatten()
        want = (a.double() * b.double()).sum(-1) + c.double()
        alignment = unit_bounds.alignment_exponent(a, b, c, unit)
        check.within(got, want, unit_bounds.one_block(alignment, got, unit))

    @pytest.mark.parametrize("unit", UNITS)
    @pytest.mark.parametrize("sign", ["mixed", "positive"])
    def test_a_chain_is_within_its_bound(self, check: Check, unit: MatrixUnit, sign: str) -> None:
        a, b = spread((32, 512), unit.inputs, 1, 2), spread((512, 32), unit.inputs, 2, 2)
        if sign == "positive":
            a, b = (x.float().abs().to(x.dtype) for x in (a, b))
        got = matmul(a, b, gpu=unit)
        sum_of_abs = a.double().abs() @ b.double().abs()
        want = a.double() @ b.double()
        check.within(got, want, unit_bounds.chain_of_blocks(sum_of_abs, 512, unit))

    @pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.values[0].inputs in PROBED])
    def test_probing_finds_the_blocks(self, check: Check, unit: MatrixUnit) -> None:
        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return matmul(a, b, gpu=unit)

        found = kernel_orders.order_of(multiply, (64, 128, 1), unit)
        check.exact(found.unit, unit)


def blocks_of(unit: MatrixUnit) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(R, L), (R, L), (R,): drawn ones, and last the one that loses most.

    That is an addend of 2^8, and products just below what the alignment keeps: of two factors just
    below 2, just below 4.
    """
    octaves = min(8, -unit.inputs.emin // 2)
    a, b = (spread((100, unit.block), unit.inputs, seed, octaves) for seed in (3, 4))
    c = spread((100,), FP32, 5, octaves)
    nearly_two = 2.0 - 2.0 ** (1 - unit.inputs.precision)
    below = unit.fraction_bits + 2 - 8
    factors = (nearly_two * 2.0 ** -(below // 2), nearly_two * 2.0 ** -(below - below // 2))
    left, right = (torch.full((1, unit.block), x).to(a.dtype) for x in factors)
    addends = torch.cat([c, torch.tensor([2.0**8])]).to(unit.output_dtype)
    return torch.cat([a, left]), torch.cat([b, right]), addends


# --- on a GPU -----------------------------------------------------------------------------------

ROWS = 128
of_each_format = pytest.mark.parametrize("fmt", [pytest.param(f, id=f.name) for f in PROBED])


def on_device(a: torch.Tensor, b: torch.Tensor, device: Device) -> torch.Tensor:
    """a b by the device's matrix unit, with its raw fp32 sums; on the CPU."""
    left, right = a.to(device.torch), b.to(device.torch)
    if a.dtype == torch.float32:
        # By the older switch, which sets the newer one as well: torch refuses to read one alone.
        with switches.attribute(torch.backends.cuda.matmul, "allow_tf32", True):
            return torch.mm(left, right).cpu()
    try:
        return torch.mm(left, right, out_dtype=torch.float32).cpu()
    except TypeError as error:
        raise Unjudged("this torch has no torch.mm(out_dtype=...), for the fp32 sums") from error


def unit_of(device: Device, fmt: Format) -> MatrixUnit | None:
    """The model of the device's unit; None where the device has no such unit."""
    if device.name.upper() not in GPUS:
        raise Unjudged(f"no model of {device.name}; known are: {', '.join(GPUS)}")
    return GPUS[device.name.upper()].units.get(fmt.name)


def first_block(
    a: torch.Tensor, b: torch.Tensor, unit: MatrixUnit
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros but for one block. Short sums would be done by other units than long ones, it may be;
    zeros change nothing, wherever a kernel adds them."""
    a[:, unit.block :] = 0
    b[unit.block :] = 0
    return a, b


def hold_to_model(
    check: Check, a: torch.Tensor, b: torch.Tensor, unit: MatrixUnit, device: Device
) -> None:
    """The device's a b has the bits of the model, in the order in which the kernel sums.

    That is one chain of blocks, or else what probing finds. An order that no model has leaves the
    case unverified, and its tree in the record.
    """
    got, want = on_device(a, b, device), matmul(a, b, gpu=unit)
    if torch.equal(got, want):
        check.observe(repr(SEQUENTIAL), name="order")
    else:
        own, accumulation = kernel_of(check, a, b, unit, device)
        want = matmul(a, b, gpu=own, accumulation=accumulation)
    check.exact(got, want, name="bits")


def kernel_of(
    check: Check, a: torch.Tensor, b: torch.Tensor, unit: MatrixUnit, device: Device
) -> tuple[MatrixUnit, Accumulation]:
    """The unit and the order of the kernel that takes such operands, by probing it; recorded."""

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return on_device(left, right, device)

    found = kernel_orders.order_of(multiply, (len(a), len(b), b.shape[1]), unit)
    check.observe(repr(found.accumulation), name="order")
    check.observe(revealing.text_of(found.tree), name="tree")
    if found.unit is None or found.accumulation is None:
        raise Unjudged("the kernel adds in an order that no model has; its tree is recorded")
    check.observe(found.unit.block, name="block")
    return found.unit, found.accumulation


def ways_that_fit(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    unit: MatrixUnit,
    accumulation: Accumulation = SEQUENTIAL,
) -> list[Tf32Input]:
    """How fp32 factors may have become TF32, for the model to have these bits."""
    ways: tuple[Tf32Input, ...] = ("truncate", "round")
    models = {
        way: matmul(a, b, gpu=unit, accumulation=accumulation, tf32_input=way) for way in ways
    }
    return [way for way, model in models.items() if torch.equal(got, model)]


@pytest.mark.gpu_only
class TestMatrixUnitOfDevice:
    @of_each_format
    @pytest.mark.parametrize("k", ["one-block", 256, 2048])
    def test_sums_are_those_of_the_model(
        self, check: Check, device: Device, fmt: Format, k: int | str
    ) -> None:
        unit = unit_of(device, fmt)
        if unit is None:
            check.observe(f"{device.name} has no {fmt.name} unit")
            return
        length = k if isinstance(k, int) else 256
        a, b = spread((ROWS, length), fmt, 5), spread((length, ROWS), fmt, 6)
        a, b = (a, b) if isinstance(k, int) else first_block(a, b, unit)
        hold_to_model(check, a, b, unit, device)

    @pytest.mark.parametrize("fmt", [pytest.param(TF32, id="tf32")])
    def test_how_fp32_reaches_the_tf32_unit(
        self, check: Check, device: Device, fmt: Format
    ) -> None:
        unit = unit_of(device, fmt)
        if unit is None:
            check.observe(f"{device.name} has no {fmt.name} unit")
            return
        generator = torch.Generator().manual_seed(7)
        shapes = ((ROWS, 256), (256, ROWS))
        a, b = first_block(*(torch.randn(s, generator=generator) for s in shapes), unit)
        got = on_device(a, b, device)
        fitting = ways_that_fit(got, a, b, unit)
        if not fitting:  # a kernel of an older chip's instructions has other blocks
            fitting = ways_that_fit(got, a, b, *kernel_of(check, a, b, unit, device))
        check.observe(fitting, name="way")
        check.exact(len(fitting), 1, name="ways-that-fit")
