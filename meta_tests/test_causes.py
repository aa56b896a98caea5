"""What keeps a check from measuring: torch, which is tested, or something outside of numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fixtures.causes import NotMeasuredError, cause_of, of_the_tested
from fixtures.distributed.pool import RankFailure

ONES = torch.ones(2, 3)


class Dying(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os._exit(1)


def raised_by(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return cause_of(error)
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def foreign_program(folder: Path) -> ModuleType:
    """A trainer, say, that calls torch."""
    path = folder / "site-packages" / "trainer.py"
    path.parent.mkdir()
    path.write_text("def step(operation):\n    return operation()\n")
    module = ModuleType("trainer")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    "act",
    [
        lambda: ONES @ ONES,
        lambda: ONES[torch.ones(6, dtype=torch.bool)],
        lambda: ONES[5],
        lambda: ONES[0, 0, 0],
        lambda: ONES.sum(2),
        lambda: torch.linalg.inv(torch.ones(2, 2, dtype=torch.float16)),
        lambda: torch.nn.functional.cross_entropy(ONES, torch.zeros(3, dtype=torch.long)),
        raising(AssertionError("the gradient of a key's bias is not 0")),
        raising(ExceptionGroup("two", [OSError("a fork"), AssertionError("a gradient")])),
        raising(RankFailure("rank 0 raised RuntimeError", 0, of_the_tested=True)),
    ],
)
def test_torch_that_raises_where_it_should_compute_is_tested(act: Callable[[], object]) -> None:
    assert of_the_tested(raised_by(act))


@pytest.mark.parametrize(
    "act",
    [
        raising(BlockingIOError(11, "Resource temporarily unavailable")),
        raising(MemoryError()),
        raising(NotMeasuredError("rank 1 was ended by SIGKILL")),
        raising(RankFailure("rank 1 was ended by SIGKILL", 1)),
        raising(ExceptionGroup("two", [KeyError("a"), OSError("a fork")])),
        raising(RuntimeError("raised by the suite itself")),
        raising(ImportError("no module named accelerate")),
        lambda: {}["a mistake of the suite"],
        lambda: [][1],
        lambda: torch.nn.functional.gelu(ONES, argument_of_another_release=1),  # type: ignore[call-arg]
        lambda: torch.empty(10**15),
        lambda: list(DataLoader(Dying(), num_workers=1)),
    ],
)
def test_what_lies_outside_of_numbers_is_not(act: Callable[[], object]) -> None:
    assert not of_the_tested(raised_by(act))


def test_what_another_program_calls_is_not(tmp_path: Path) -> None:
    program = foreign_program(tmp_path)
    assert not of_the_tested(raised_by(lambda: program.step(lambda: ONES @ ONES)))
    assert "trainer" not in sys.modules


@pytest.mark.parametrize(
    ("said", "tested"),
    [
        ("lowering", True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("file too short", False),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", False),
        ("CUDA error: uncorrectable ECC error encountered", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", False),
        ("NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", False),
    ],
)
def test_what_a_machine_refuses_is_not_torch_s_though_torch_says_it(
    said: str, tested: bool
) -> None:
    file = Path(torch.__file__).parent / "_inductor" / "compile.py"
    code = compile(f"raise RuntimeError('ImportError: ab.main.so: {said}')", str(file), "exec")
    assert of_the_tested(raised_by(lambda: exec(code))) is tested
