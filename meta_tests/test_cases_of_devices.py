"""Tests of which cases a device has: what it cannot do is no case, and no example of a property."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fixtures.attending import BACKENDS, TAKES, attend, draw_case, has_case, inputs_of, takes_shape
from fixtures.devices import CPU, Device
from fixtures.numerics.formats import BF16, FP16, FP32, FP64, Format
from meta_tests.running import ROOT, Repository, copy_repository

H100 = Device("h100", "cuda", ("cuda", "hopper", "h100"))
V100 = Device("v100", "cuda", ("cuda", "volta", "v100"))
GPUS = "NVIDIA H100 80GB HBM3/9.0,Tesla V100-SXM2-16GB/7.0"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    nodes = ("attention", "checkpoint_recompute", "dropout_mask", "layer_norm", "weight_update")
    return copy_repository(tmp_path_factory.mktemp("cases"), *nodes)


@pytest.fixture(scope="module")
def collected(repository: Repository) -> list[str]:
    """Of the cases of all devices: ``attention test_layouts[h100-bf16-flash]``."""
    ended = repository.run("--collect-only", "-q", PRECISION_SIMULATED_GPUS=GPUS)
    assert ended.code == 0, ended.text
    found = re.findall(r"(?m)^precision_tests/test_(\w+)\.py::\w+::(.+)$", ended.text)
    return [f"{node} {name}" for node, name in found]


@pytest.mark.parametrize(
    ("test", "of_cpu", "of_h100", "of_v100"),
    [
        # By format, of bf16, fp16, fp32, fp64: math and flash on the CPU; 4, 4, 2, 1 on an H100
        # and 1, 2, 2, 1 on a V100. Flash takes no mask on CUDA.
        ("attention test_layouts", 8, 11, 6),
        ("attention test_blind_query_yields_zero", 8, 9, 6),
        ("attention test_grouped_queries", 8, 6, 4),
        ("attention test_alone_or_in_a_batch", 8, 0, 0),
        ("dropout_mask test_mask_is_that_of_mt19937", 80, 0, 0),
        ("dropout_mask test_mask_follows_memory", 32, 0, 0),
        ("dropout_mask test_threads_do_not_matter", 1, 0, 0),
    ],
)
def test_counts_of_cases(
    collected: list[str], test: str, of_cpu: int, of_h100: int, of_v100: int
) -> None:
    found = [name for name in collected if name.partition("[")[0] == test]
    counts = [sum(f"[{device}" in n for n in found) for device in ("cpu", "h100", "v100")]
    assert counts == [of_cpu, of_h100, of_v100], found


def test_what_is_no_case_is_not_counted(repository: Repository) -> None:
    ended = repository.run("--collect-only", "-q")
    listed = sum("::" in line for line in ended.text.splitlines())
    assert re.search(rf"(?m)^{listed} tests collected", ended.text), ended.text.splitlines()[-3:]


def test_fused_optimizers_of_cuda_have_one_layout(collected: list[str]) -> None:
    fused = {
        device: [
            n
            for n in collected
            if n.startswith(f"weight_update test_layouts[{device}") and "-fused" in n
        ]
        for device in ("cpu", "h100")
    }
    assert len(fused["cpu"]) == 15
    assert len(fused["h100"]) == 5
    assert all("same" in name for name in fused["h100"])


def test_layer_norm_of_cuda_has_no_weight_of_another_format(collected: list[str]) -> None:
    found = [name for name in collected if "fp32-affine" in name]
    assert [name for name in found if "[cpu" not in name] == []
    assert len(found) == 8  # four kinds of rows in two formats


def test_threads_of_the_host_are_no_case_of_a_gpu(collected: list[str]) -> None:
    found = [
        n
        for n in collected
        if n.startswith("checkpoint_recompute test_gradients_are_those_without")
    ]
    assert any("[cpu" in n and "threads2" in n for n in found)
    assert [n for n in found if "[cpu" not in n and "threads2" in n] == []
    assert any("[h100" in n and "threads1" in n for n in found)


@pytest.mark.parametrize(
    ("fmt", "backend", "sizes", "kind", "taken"),
    [
        (FP32, "flash", (16, 16, 16), "none", False),
        (BF16, "flash", (16, 16, 256), "causal", True),
        (BF16, "flash", (16, 16, 264), "none", False),
        (BF16, "flash", (17, 16, 16), "causal", False),
        (BF16, "flash", (17, 16, 16), "none", True),
        (BF16, "flash", (16, 16, 16), "padding", False),
        (FP16, "efficient", (1, 1, 8), "bias", True),
        (FP16, "efficient", (1, 1, 4), "none", False),
        (FP32, "efficient", (1, 1, 4), "none", True),
        (FP32, "efficient", (1, 1, 6), "none", False),
        (FP64, "efficient", (16, 16, 16), "none", False),
        (BF16, "cudnn", (3, 1, 16), "none", False),
        (BF16, "cudnn", (3, 2, 128), "bias", True),
        (BF16, "cudnn", (3, 2, 136), "none", False),
        (FP64, "math", (1, 1, 1), "bias", True),
    ],
)
def test_what_a_backend_takes_on_cuda(
    fmt: Format, backend: str, sizes: tuple[int, ...], kind: str, taken: bool
) -> None:
    """As ``can_use_*_attention`` of torch's sdp_utils.cpp decide."""
    assert has_case(H100, fmt, backend, sizes, kind) is taken


def test_old_chips_have_no_flash_and_no_bf16_in_fused_kernels() -> None:
    assert [b for b in BACKENDS if has_case(V100, BF16, b)] == ["math"]
    assert [b for b in BACKENDS if has_case(V100, FP16, b)] == ["math", "efficient"]
    assert not takes_shape(H100, FP16, "flash", "blocks-padded")
    assert takes_shape(H100, FP16, "cudnn", "blocks-padded")


def test_a_pretended_gpu_has_no_fused_kernel() -> None:
    pretended = replace(H100, pretended=True)
    assert [b for b in BACKENDS if has_case(pretended, BF16, b)] == ["math"]


@given(data=st.data(), fmt=st.sampled_from([BF16, FP16, FP32, FP64]))
def test_only_what_a_backend_takes_is_drawn(data: st.DataObject, fmt: Format) -> None:
    for name, takes in {**TAKES["cuda"], **TAKES["cpu"]}.items():
        if fmt in takes.formats:
            sizes, kind = draw_case(data.draw, takes, fmt)
            assert takes.case(fmt, sizes, kind), name


class TestRefusal:
    """The CPU has no memory-efficient kernel: torch refuses, whatever the table says."""

    def test_of_a_check_is_unverified(self) -> None:
        with pytest.raises(pytest.skip.Exception, match="efficient: No viable backend"):
            attend(inputs_of("causal"), True, FP32, CPU, "efficient")

    def test_of_cudnn_is_unverified_and_an_error_of_its_kernel_is_not(self) -> None:
        """torch passes on what cuDNN then has no kernel for: pytorch issue 140930."""

        def raising(words: str) -> Callable[..., Tensor]:
            def operation(*operands: Tensor, **options: object) -> Tensor:
                raise RuntimeError(f"cuDNN Frontend error: [cudnn_frontend] Error: {words}")

            return operation

        none = raising("No execution plans support the graph.")
        with pytest.raises(pytest.skip.Exception, match="No execution plans support the graph"):
            attend(inputs_of("causal"), True, FP32, CPU, "flash", none)
        broken = raising("the plan could not be executed.")
        with pytest.raises(RuntimeError, match="could not be executed"):
            attend(inputs_of("causal"), True, FP32, CPU, "math", broken)

    def test_of_an_example_is_followed_by_another(self) -> None:
        seen = []

        @settings(max_examples=20, database=None)
        @given(st.sampled_from(["efficient", "math"]))
        def attends(backend: str) -> None:
            attend(inputs_of("causal"), True, FP32, CPU, backend)
            seen.append(backend)

        attends()
        assert set(seen) == {"math"}


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def skips_in_properties(path: Path) -> list[str]:
    """Properties from which ``pytest.skip`` is called, in themselves or in what they call there."""
    functions = functions_of(path)

    def skips(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if name in seen or name not in functions:
            return False
        calls = [ast.unparse(n.func) for n in ast.walk(functions[name]) if isinstance(n, ast.Call)]
        return "pytest.skip" in calls or any(
            skips(call.removeprefix("self."), seen | {name}) for call in calls
        )

    decorated = {n: [ast.unparse(d) for d in f.decorator_list] for n, f in functions.items()}
    properties = [n for n, marks in decorated.items() if any(m.startswith("given(") for m in marks)]
    return [f"{path.stem}:{name}" for name in properties if skips(name)]


def test_no_property_skips(tmp_path: Path) -> None:
    """A skip ends the property at its first example; ``hypothesis.reject`` goes on."""
    modules = (ROOT / "precision_tests").glob("test_*.py")
    assert [name for path in modules for name in skips_in_properties(path)] == []
    planted = tmp_path / "planted.py"
    planted.write_text("def f(): pytest.skip('')\n@given(x=0)\ndef p(x): f()\ndef q(): f()\n")
    assert skips_in_properties(planted) == ["planted:p"]


@pytest.mark.parametrize(
    ("backend", "raised"), [("flash", pytest.skip.Exception), ("math", RuntimeError)]
)
def test_the_math_backend_cannot_be_refused(backend: str, raised: type[BaseException]) -> None:
    def refuse(*arguments: Tensor, **options: object) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(raised, match="No available kernel"):
        attend(inputs_of("causal"), True, FP32, CPU, backend, refuse)
