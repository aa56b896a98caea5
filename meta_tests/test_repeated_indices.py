"""Tests of the limits of repeated indices, against emulations of CUDA's kernels that add them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fixtures.devices import CPU, Device
from fixtures.numerics import accumulation_bounds
from fixtures.numerics.errors import compare
from fixtures.numerics.formats import BF16, FP16, FP32, Format, round_to
from precision_tests.test_gradient_accumulation import REPEATS, bound_inside, gradient_rows

H100 = Device("h100", "cuda", ("cuda", "hopper", "h100"))
sixteen_bits = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)


def embedding(rows: Tensor, fmt: Format) -> Tensor:
    """Embedding.cu: fp32 within 32 rows, then an addition in the format."""
    total = rows.new_zeros(rows.shape[1:])
    for block in rows.split(32):
        within = torch.zeros(rows.shape[1:])
        for row in block.float():
            within = within + row
        total = total + within.to(fmt.dtype)
    return total


def wide_index(rows: Tensor, fmt: Format) -> Tensor:
    """Indexing.cu: every row is added in the format."""
    total = rows.new_zeros(rows.shape[1:])
    for row in rows:
        total = total + row
    return total


def margin(got: Tensor, implementation: str, rows: Tensor, fmt: Format) -> float:
    """Error over the limit that the check sets on an H100."""
    want = rows.double().sum(0)
    limit = bound_inside(implementation, rows, want, H100, fmt).limit
    return compare(got, want, limit, fmt).margin


def adverse(blocks: int) -> Tensor:
    """(32 blocks, 1) of bf16 whose sum loses 2^-8 in each block: u, of a sum that is 1."""
    rows = torch.zeros(32 * blocks, 1, dtype=torch.bfloat16)
    rows[0], rows[1::32] = 1.0, 2.0**-8
    return rows


@sixteen_bits
def test_the_emulated_kernels_stay_within_their_limits(fmt: Format) -> None:
    rows = gradient_rows(fmt, 1000)
    assert margin(embedding(rows, fmt), "embedding-frequent", rows, fmt) < 0.2
    assert margin(wide_index(rows, fmt), "index-frequent", rows, fmt) == pytest.approx(1.0)
    few = rows[: REPEATS["index"]]
    assert margin(embedding(few, fmt), "embedding", few, fmt) <= 1
    assert margin(wide_index(few, fmt), "index", few, fmt) <= 1


@sixteen_bits
def test_a_kernel_that_adds_in_fp32_stays_within_them_too(fmt: Format) -> None:
    rows = gradient_rows(fmt, 1000)
    once = round_to(rows.double().sum(0), fmt).to(fmt.dtype)
    for implementation in ("embedding-frequent", "index-frequent"):
        assert margin(once, implementation, rows, fmt) < 1


@pytest.mark.parametrize(("blocks", "least"), [(2, 0.97), (32, 0.77)])
def test_the_limit_of_blocks_is_nearly_reached(blocks: int, least: float) -> None:
    rows = adverse(blocks)
    assert least < margin(embedding(rows, BF16), "embedding-frequent", rows, BF16) < 1


@sixteen_bits
def test_faults_leave_them(fmt: Format) -> None:
    """Rows that were lost: a tenth in fp16, half in bf16, where a third is lost anyway."""
    rows = gradient_rows(fmt, 1000)
    lost = rows[: 900 if fmt is FP16 else 500]
    assert margin(wide_index(lost, fmt), "index-frequent", rows, fmt) > 1
    assert margin(embedding(lost, fmt), "embedding-frequent", rows, fmt) > 1


def test_blocks_that_are_added_one_by_one_leave_theirs() -> None:
    rows = gradient_rows(BF16, 1000)
    assert margin(wide_index(rows, BF16), "embedding-frequent", rows, BF16) > 2


@sixteen_bits
def test_rows_as_wide_as_a_warp_and_bias_gradients_are_summed_in_fp32(fmt: Format) -> None:
    rows = gradient_rows(fmt, 1000)
    for implementation, part in (("index-narrow-frequent", rows[:, :32]), ("bias", rows)):
        assert margin(wide_index(part, fmt), implementation, part, fmt) > 1


def test_the_cpu_and_fp32_keep_the_limit_of_fp32() -> None:
    for device, fmt in ((CPU, BF16), (H100, FP32)):
        rows = gradient_rows(fmt, 1000)
        bound = bound_inside("index-frequent", rows, rows.double().sum(0), device, fmt)
        assert bound.theorem.startswith("gamma_(K-1), 1000 terms in fp32")


def test_one_block_is_a_sum_in_fp32_and_one_rounding() -> None:
    limit = accumulation_bounds.in_blocks(1.0, 8, 32, BF16).limit
    assert limit == pytest.approx(2.0**-8 / (1 - 2.0**-8) + 7 * 2.0**-24, rel=1e-3)
