"""Random streams of CUDA devices: does the device draw what the model draws?

On the CPU (mark ``models``) the model is held to numbers that owners of GPUs have published, and
the share of values that differ between two GPUs is recorded. On a GPU each draw is held to the
model of that very device, below, at and above one grid and across the calls of a thread: uniform
numbers, masks, integers and permutations bit for bit, and the generator's offset after each; normal
and exponential numbers within what the undocumented tables of the special function unit may change.

What goes wrong: a release changes the grid, or the width of a kernel, and one seed means other
numbers; a MIG slice or another chip has another grid and trains on other masks.

Mechanism, sources per release and what is unverified: docs/device_random.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fixtures.check import Check
from fixtures.devices import Device
from fixtures.hardware_models import device_integers, device_random
from fixtures.hardware_models.grids import GRIDS, Grid, grid_of_device
from fixtures.hardware_models.offsets import offset_after
from fixtures.hardware_models.published import PUBLISHED, RULES, Published
from fixtures.hardware_models.torch_rules import rules_of
from fixtures.numerics import device_random_bounds as bounds
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from fixtures.unjudged import Unjudged

SEED = 20_241_212
formats = pytest.mark.parametrize("fmt", [BF16, FP16, FP32, FP64], ids=lambda fmt: fmt.name)
up_to_fp32 = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
SIZES: dict[str, Callable[[int], int]] = {
    "one-number": lambda threads: 1,
    "half-a-grid": lambda threads: threads // 2 + 1,
    "a-grid": lambda threads: threads,
    "a-grid-and-one": lambda threads: threads + 1,
    "a-call-of-each-thread": lambda threads: 4 * threads,
    "and-one": lambda threads: 4 * threads + 1,
    "three-calls": lambda threads: 9 * threads + 77,
}
"""Numbers to draw, by the threads of the whole grid."""
sizes = pytest.mark.parametrize("size", SIZES)


@pytest.mark.models
class TestModel:
    @pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.name)
    def test_agrees_with_what_was_published(self, check: Check, published: Published) -> None:
        check.exact(published.draw(published.grid), published.printed)

    @pytest.mark.parametrize("other", [name for name in GRIDS if name != "A100"])
    def test_share_of_values_that_differ_from_an_a100(self, check: Check, other: str) -> None:
        """Of a million uniform numbers and of a mask: recorded, as nothing need be equal."""
        count = 2**20
        draws = [
            [
                device_random.uniform(count, seed=SEED, gpu=gpu, torch_version=RULES),
                device_random.dropout_mask(count, 0.1, seed=SEED, gpu=gpu, torch_version=RULES),
            ]
            for gpu in ("A100", other)
        ]
        shares = [float((a != b).double().mean()) for a, b in zip(*draws, strict=True)]
        check.observe(dict(zip(("uniform", "dropout at 0.1"), shares, strict=True)))
        same = GRIDS[other].blocks == GRIDS["A100"].blocks
        check.exact(shares == [0.0, 0.0], same, name="only-another-grid-differs")


@pytest.fixture
def grid(device: Device) -> Grid:
    try:
        rules_of()
    except ValueError as unknown:
        raise Unjudged(str(unknown)) from unknown
    return grid_of_device(device.torch)


def size_on(grid: Grid, size: str) -> int:
    return SIZES[size](256 * grid.blocks)


def drawn(device: Device, draw: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The device's tensor after seeding, and the generator's offset."""
    with torch.random.fork_rng([device.torch]), torch.cuda.device(device.torch):
        torch.cuda.manual_seed(SEED)
        result = draw().cpu()
        seed_and_offset = torch.cuda.get_rng_state(device.torch).view(torch.int64)
    return result, int(seed_and_offset[1])


@pytest.mark.gpu_only
class TestDevice:
    @sizes
    @formats
    def test_uniform(
        self, check: Check, device: Device, fmt: Format, grid: Grid, size: str
    ) -> None:
        count = size_on(grid, size)
        got, offset = drawn(device, lambda: torch.rand(count, dtype=fmt.dtype, device=device.torch))
        check.exact(got, device_random.uniform(count, seed=SEED, gpu=grid, dtype=fmt.dtype))
        want = offset_after("uniform", count, gpu=grid, dtype=fmt.dtype)
        check.exact(offset, want, name="offset")

    @up_to_fp32
    def test_uniform_between_bounds(
        self, check: Check, device: Device, fmt: Format, grid: Grid
    ) -> None:
        count = size_on(grid, "a-grid-and-one")
        got, _ = drawn(
            device,
            lambda: torch.empty(count, dtype=fmt.dtype, device=device.torch).uniform_(-0.3, 1.7),
        )
        want = device_random.uniform(
            count, low=-0.3, high=1.7, seed=SEED, gpu=grid, dtype=fmt.dtype
        )
        check.exact(got, want)

    @sizes
    @formats
    def test_normal(self, check: Check, device: Device, fmt: Format, grid: Grid, size: str) -> None:
        count = size_on(grid, size)
        got, offset = drawn(
            device, lambda: torch.randn(count, dtype=fmt.dtype, device=device.torch)
        )
        want = device_random.normal(count, seed=SEED, gpu=grid, dtype=fmt.dtype)
        check.exact(offset, offset_after("normal", count, gpu=grid, dtype=fmt.dtype), name="offset")
        if fmt == FP64:
            bound = bounds.normal_double(want)
        else:
            wide = device_random.normal(count, seed=SEED, gpu=grid)
            uncertainty = device_random.normal_uncertainty(count, seed=SEED, gpu=grid)
            bound = bounds.normal(wide, uncertainty, fmt)
        check.within(got, want.double(), bound)
        equal = (got == want).double().mean().item()
        check.observe(equal, name="share-of-equal-bits")

    @up_to_fp32
    def test_exponential(self, check: Check, device: Device, fmt: Format, grid: Grid) -> None:
        count = size_on(grid, "a-grid-and-one")
        got, _ = drawn(
            device, lambda: torch.empty(count, dtype=fmt.dtype, device=device.torch).exponential_()
        )
        wide = device_random.exponential(count, seed=SEED, gpu=grid)
        bound = bounds.exponential(wide, device_random.exponential_uncertainty(wide), fmt)
        check.within(got, wide.to(fmt.dtype).double(), bound)

    @sizes
    @formats
    def test_bernoulli(
        self, check: Check, device: Device, fmt: Format, grid: Grid, size: str
    ) -> None:
        count = size_on(grid, size)
        got, _ = drawn(
            device,
            lambda: torch.empty(count, dtype=fmt.dtype, device=device.torch).bernoulli_(0.3),
        )
        want = device_random.bernoulli(count, 0.3, seed=SEED, gpu=grid, dtype=fmt.dtype)
        check.exact(got, want, name="of-a-number")
        p = torch.linspace(0, 1, count, dtype=fmt.dtype)
        got, offset = drawn(device, lambda: torch.bernoulli(p.to(device.torch)))
        want = device_random.bernoulli(count, p, seed=SEED, gpu=grid, dtype=fmt.dtype)
        check.exact(got, want, name="of-a-tensor")
        check.exact(offset, offset_after("bernoulli_tensor", count, gpu=grid), name="offset")

    @sizes
    @formats
    @pytest.mark.parametrize("multiple", [1, 2, 8], ids=lambda m: f"multiple-of-{m}")
    def test_dropout(
        self,
        check: Check,
        device: Device,
        fmt: Format,
        grid: Grid,
        size: str,
        multiple: int,
    ) -> None:
        """Sizes odd, even and multiples of 8: kernels for one, two and up to eight neighbours."""
        count = size_on(grid, size) // 8 * 8 + multiple
        x = torch.ones(count, dtype=fmt.dtype, device=device.torch)
        got, offset = drawn(device, lambda: F.dropout(x, 0.1) != 0)
        want = device_random.dropout_mask(count, 0.1, seed=SEED, gpu=grid, dtype=fmt.dtype)
        check.exact(got, want)
        check.exact(offset, offset_after("dropout_mask", count, gpu=grid), name="offset")

    def test_second_draw_begins_where_the_first_ended(
        self, check: Check, device: Device, grid: Grid
    ) -> None:
        count = size_on(grid, "and-one")

        def two() -> Tensor:
            torch.rand(count, device=device.torch)
            return torch.rand(count, device=device.torch)

        got, _ = drawn(device, two)
        offset = offset_after("uniform", count, gpu=grid)
        check.exact(got, device_random.uniform(count, seed=SEED, gpu=grid, offset=offset))

    @pytest.mark.parametrize("high", [10, 2**28 - 1, 2**28, 2**33])
    def test_randint(self, check: Check, device: Device, grid: Grid, high: int) -> None:
        count = size_on(grid, "a-grid-and-one")
        got, offset = drawn(
            device, lambda: torch.randint(-5, high - 5, (count,), device=device.torch)
        )
        want = device_integers.randint(-5, high - 5, count, seed=SEED, gpu=grid)
        check.exact(got, want)
        after = offset_after("randint", count, gpu=grid, dtype=torch.int64, span=high)
        check.exact(offset, after, name="offset")

    @pytest.mark.parametrize("count", [1, 2, 1000, 30_000, 40_000, 1_000_000])
    def test_randperm(self, check: Check, device: Device, grid: Grid, count: int) -> None:
        got, offset = drawn(device, lambda: torch.randperm(count, device=device.torch))
        check.exact(got, device_integers.randperm(count, seed=SEED, gpu=grid))
        check.exact(offset, offset_after("randperm", count, gpu=grid), name="offset")
