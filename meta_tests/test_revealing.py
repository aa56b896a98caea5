"""Summation trees found by probing: of sums whose order is known, and of torch's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.check import Check
from fixtures.devices import CPU, Device
from fixtures.hardware_models import kernel_orders
from fixtures.hardware_models.accumulation import SEQUENTIAL, Accumulation, SliceK, SplitK
from fixtures.hardware_models.kernel_orders import in_order, order_of, tree_of
from fixtures.hardware_models.matrix_units import matmul
from fixtures.hardware_models.revealing import (
    NoTreeError,
    Tree,
    of_products,
    one_by_one,
    reveal,
    text_of,
)
from fixtures.hardware_models.units import GPUS, INPUT_DTYPES, MatrixUnit
from fixtures.numerics.formats import BF16, TF32, Format
from fixtures.record import Case
from fixtures.switches import keep_precision
from precision_tests import test_hardware_models_matrix_units as checks


def sum_along(tree: Tree, x: torch.Tensor) -> torch.Tensor:
    """fp32 sums along a tree; a node of more than two children adds exactly, then truncates
    what lies far below the greatest, as a matrix unit does."""
    if isinstance(tree, int):
        return x[tree]
    parts = [sum_along(child, x) for child in tree]
    if len(parts) == 2:
        return parts[0] + parts[1]
    greatest = max(abs(part.item()) for part in parts)
    kept = [part.item() for part in parts if abs(part.item()) * 2.0**25 >= greatest]
    return torch.tensor(sum(kept))


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, int]:
    count = draw(st.integers(1, 12))
    nodes: list[Tree] = list(draw(st.permutations(range(count))))
    while len(nodes) > 1:
        joined = draw(st.integers(2, min(4, len(nodes))))
        start = draw(st.integers(0, len(nodes) - joined))
        nodes[start : start + joined] = [tuple(nodes[start : start + joined])]
    return nodes[0], count


@given(trees())
def test_any_tree_is_found(drawn: tuple[Tree, int]) -> None:
    tree, count = drawn
    found = reveal(one_by_one(lambda x: sum_along(tree, x)), count)
    assert found == in_order(tree)


def test_a_chain_and_a_pairwise_sum() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(x)).cumsum(0)[-1]

    def pairwise(x: torch.Tensor) -> torch.Tensor:
        return x[0] if len(x) == 1 else pairwise(x[: len(x) // 2]) + pairwise(x[len(x) // 2 :])

    assert text_of(reveal(one_by_one(chain), 5)) == "((((0 1) 2) 3) 4)"
    assert text_of(reveal(one_by_one(pairwise), 8)) == "(((0 1) (2 3)) ((4 5) (6 7)))"


@pytest.mark.parametrize("n", [3, 16, 100])
def test_torchs_own_sum_has_a_tree_that_reproduces_it(n: int) -> None:
    tree = reveal(one_by_one(torch.sum), n)
    generator = torch.Generator().manual_seed(n)
    for _ in range(20):
        x = torch.randn(n, generator=generator)
        assert torch.equal(sum_along(tree, x), x.sum())


def test_torchs_own_matrix_product_has_a_tree() -> None:
    sums = of_products(torch.mm, (16, 64, 16), torch.float32, 1)
    found = text_of(reveal(sums, 64))
    assert sorted(map(int, found.replace("(", " ").replace(")", " ").split())) == list(range(64))


@pytest.mark.parametrize(
    ("gpu", "fmt", "accumulation", "expected"),
    [
        ("V100", "fp16", SEQUENTIAL, "(((((((0 1) 2) 3) 4) 5) 6) 7)"),
        ("A100", "bf16", SEQUENTIAL, "((((0 1) 2 3) 4 5) 6 7)"),
        ("H100", "fp16", SEQUENTIAL, "((0 1 2 3) 4 5 6 7)"),
        ("H100", "bf16", SplitK(2), "((0 1 2 3) (4 5 6 7))"),
        ("A100", "fp16", SplitK(2), "(((0 1) 2 3) ((4 5) 6 7))"),
        ("A100", "bf16", SplitK(4, order="pairwise"), "(((0 1) (2 3)) ((4 5) (6 7)))"),
        ("A100", "bf16", SplitK(4, order="descending"), "((0 1) ((2 3) ((4 5) (6 7))))"),
        ("A100", "bf16", SliceK(2, chunk=8), "(((0 1) 4 5) ((2 3) 6 7))"),
    ],
)
def test_the_models_orders(gpu: str, fmt: str, accumulation: Accumulation, expected: str) -> None:
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a, b, gpu=gpu, accumulation=accumulation)

    values = {"mask": 2.0**15, "unit": 2.0**-24} if fmt == "fp16" else {}
    sums = of_products(multiply, (8, 32, 1), INPUT_DTYPES[fmt], 4)
    assert text_of(reveal(sums, 8, **values)) == expected
    assert text_of(tree_of(accumulation, 32, GPUS[gpu].units[fmt].block)) == expected


def test_what_is_no_sum_is_refused() -> None:
    with pytest.raises(NoTreeError, match="give mask and unit"):
        reveal(one_by_one(torch.max), 6)
    with pytest.raises(NoTreeError, match="not one tree"):
        reveal(one_by_one(torch.sum), 6, mask=4.0)  # 4 absorbs nothing
    with pytest.raises(ValueError, match="at least one"):
        reveal(one_by_one(torch.sum), 0)


def test_an_order_that_no_model_has_is_reported_as_such() -> None:
    def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a.flip(-1), b.flip(0), gpu="A100", accumulation=SplitK(3))

    found = order_of(backwards, (16, 128, 1), GPUS["A100"].units["bf16"])
    assert (found.unit, found.accumulation) == (None, None)
    assert text_of(found.tree).startswith("((0 1 (2 3 (4 5 (6 7)))) ")


class TestOnADevice:
    """The checks of a GPU, with a model in its place."""

    device = Device("h100", "cuda", ("cuda", "hopper", "h100"))

    def check(self) -> Check:
        return Check(
            Case("hardware_models", "matrix_units", "pretended", "h100"), {"torch": "2.13.0"}
        )

    def pretend(
        self, monkeypatch: pytest.MonkeyPatch, gpu: str | MatrixUnit, **arguments: Any
    ) -> None:
        def on_device(a: torch.Tensor, b: torch.Tensor, device: Device) -> torch.Tensor:
            return matmul(a, b, gpu=gpu, **arguments)

        monkeypatch.setattr(checks, "on_device", on_device)

    def hold(self, check: Check, fmt: Format, k: int | str = 256) -> None:
        tests = checks.TestMatrixUnitOfDevice()
        tests.test_sums_are_those_of_the_model(check, self.device, fmt, k)

    @pytest.mark.parametrize("fmt", checks.PROBED, ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("k", ["one-block", 256])
    def test_passes_a_unit_like_the_model(
        self, monkeypatch: pytest.MonkeyPatch, fmt: Format, k: int | str
    ) -> None:
        self.pretend(monkeypatch, "H100")
        check = self.check()
        self.hold(check, fmt, k)
        assert {case.outcome for case in check.cases.values()} == {"inside"}

    @pytest.mark.parametrize("k", ["one-block", 256])
    def test_fails_another_unit(self, monkeypatch: pytest.MonkeyPatch, k: int | str) -> None:
        self.pretend(monkeypatch, "A100")
        with pytest.raises(AssertionError, match="elements differ"):
            self.hold(self.check(), BF16, k)

    def test_finds_the_order_of_a_split_kernel_and_records_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.pretend(monkeypatch, "H100", accumulation=SplitK(4))
        check = self.check()
        self.hold(check, BF16)
        assert "SplitK(partitions=4" in self.recorded(check, "order")
        assert self.recorded(check, "tree").count("(") > 16
        assert self.recorded(check, "block") == "16"

    def test_finds_half_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        half = replace(GPUS["H100"].units["bf16"], block=8)
        self.pretend(monkeypatch, half)
        check = self.check()
        self.hold(check, BF16, "one-block")
        assert self.recorded(check, "block") == "8"

    def test_leaves_an_unknown_order_unverified(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def backwards(a: torch.Tensor, b: torch.Tensor, device: Device) -> torch.Tensor:
            return matmul(a.flip(-1), b.flip(0), gpu="H100", accumulation=SplitK(3))

        monkeypatch.setattr(checks, "on_device", backwards)
        with pytest.raises(pytest.skip.Exception, match="its tree is recorded"):
            self.hold(self.check(), BF16)

    def recorded(self, check: Check, name: str) -> str:
        (case,) = (c for c in check.cases.values() if c.name == f"pretended-{name}")
        return bytes(case.observed["value"].bits.tolist()).decode()

    def test_says_how_fp32_reaches_the_unit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pretend(monkeypatch, "H100", tf32_input="round")
        check = self.check()
        checks.TestMatrixUnitOfDevice().test_how_fp32_reaches_the_tf32_unit(
            check, self.device, TF32
        )
        assert self.recorded(check, "way") == '["round"]'

    def test_says_how_fp32_reaches_the_unit_of_an_older_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A library may serve an H100 by instructions with half the block: no other arithmetic."""
        own = GPUS["H100"].units["tf32"]
        self.pretend(monkeypatch, replace(own, block=own.block // 2), tf32_input="truncate")
        check = self.check()
        checks.TestMatrixUnitOfDevice().test_how_fp32_reaches_the_tf32_unit(
            check, self.device, TF32
        )
        assert self.recorded(check, "way") == '["truncate"]'
        assert self.recorded(check, "block") == str(own.block // 2)

    def test_fp32_products_are_tf32_by_both_switches_and_by_none_afterwards(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch 2.9 and later have two, and raise where one is read that contradicts the other."""
        switches, seen = torch.backends.cuda.matmul, []

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.append((switches.allow_tf32, getattr(switches, "fp32_precision", "tf32")))
            return a

        keep_precision()
        monkeypatch.setattr(torch, "mm", product)
        checks.on_device(torch.ones(2, 2), torch.ones(2, 2), CPU)
        assert seen == [(True, "tf32")]
        after = (switches.allow_tf32, getattr(switches, "fp32_precision", "ieee"))
        assert after == (False, "ieee")

    def test_candidates_differ_from_each_other(self) -> None:
        unit = GPUS["H100"].units["bf16"]
        named = [(u.block, a) for u, a in kernel_orders.candidates(unit)]
        assert len(named) == len(set(named))
