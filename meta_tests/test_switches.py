"""Tests of what every check promises of torch's switches, and of what overrides them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fixtures import environment, switches
from fixtures.devices import CPU
from fixtures.numerics.formats import TF32, round_to
from meta_tests.running import copy_repository

BACKENDS: Any = torch.backends
MATMUL = BACKENDS.cuda.matmul
SWITCHES = [
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
]
PER_KIND = [BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn]


@pytest.fixture(autouse=True)
def set_back() -> Iterator[None]:
    switches.lost_precision.cache_clear()
    yield
    BACKENDS.fp32_precision = "none"
    switches.keep_precision()
    switches.lost_precision.cache_clear()


def test_a_release_without_switches_per_kind_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.5 to 2.8 has no ``cudnn.conv`` at all."""
    matmul = SimpleNamespace(allow_tf32=True, allow_bf16_reduced_precision_reduction=True)
    old = SimpleNamespace(
        cuda=SimpleNamespace(matmul=matmul), cudnn=SimpleNamespace(allow_tf32=True)
    )
    with monkeypatch.context() as before:
        before.setattr(torch, "backends", old)
        switches.keep_precision()
    assert vars(matmul) == {"allow_tf32": False, "allow_bf16_reduced_precision_reduction": False}
    assert not old.cudnn.allow_tf32


def kept() -> list[Any]:
    return [
        torch.get_float32_matmul_precision(),
        MATMUL.allow_tf32,
        BACKENDS.cudnn.allow_tf32,
        *(getattr(kind, "fp32_precision", "ieee") for kind in PER_KIND),
        *(bool(getattr(MATMUL, name, False)) for name in SWITCHES),
    ]


def by_old_names() -> None:
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.allow_tf32 = True


def by_new_names() -> None:
    for kind in PER_KIND:
        kind.fp32_precision = "tf32"


def for_all_kinds() -> None:
    BACKENDS.fp32_precision = "tf32"


def sums_in_16_bit() -> None:
    for name in SWITCHES:
        setattr(MATMUL, name, True)


@pytest.mark.parametrize("change", [by_old_names, by_new_names, for_all_kinds, sums_in_16_bit])
def test_whatever_was_set_before_is_set_as_limits_assume(change: Any) -> None:
    if change in (by_new_names, for_all_kinds) and not hasattr(MATMUL, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    change()
    switches.keep_precision()
    assert kept() == ["highest", False, False, *["ieee"] * 3, *[False] * 3]


def test_an_environment_of_the_cpu_does_not_move() -> None:
    """The id of records that were made before the suite set them."""
    BACKENDS.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    before = environment.describe([CPU])
    switches.keep_precision()
    assert environment.describe([CPU]) == before


def test_a_check_runs_under_them(tmp_path: Any) -> None:
    """Also where a module that was loaded before, or another check, set something else."""
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.set_float32_matmul_precision("medium")

        class TestOp:
            @pytest.mark.parametrize("turn", [1, 2])
            def test_kept(self, check, turn):
                matmul = torch.backends.cuda.matmul
                found = (torch.get_float32_matmul_precision(), matmul.allow_tf32)
                check.exact(found, ("highest", False))
                check.exact(bool(matmul.allow_bf16_reduced_precision_reduction), False, name="sums")
                torch.set_float32_matmul_precision("high")
        """
    )
    ended = repository.run()
    assert ended.code == 0, ended.text


class TestLost:
    def test_of_a_sound_device_is_nothing(self) -> None:
        assert switches.lost_precision(torch.device("cpu")) == ""

    @pytest.mark.parametrize(
        ("operation", "what"), [("linear", "products"), ("conv2d", "convolutions")]
    )
    def test_names_what_is_rounded_and_the_variable(
        self, operation: str, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exact = getattr(F, operation)

        def in_tf32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return exact(round_to(x.double(), TF32).float(), weight)  # type: ignore[no-any-return]

        monkeypatch.setattr(F, operation, in_tf32)
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
        wanted = f"fp32 {what} round their factors, whatever torch is told: "
        assert (
            switches.lost_precision(torch.device("cpu")) == wanted + "unset NVIDIA_TF32_OVERRIDE=1"
        )

    def test_leaves_checks_in_fp32_unverified_and_asked_for(self, tmp_path: Any) -> None:
        """A pretended GPU, whose convolutions take TF32 where nobody switches it off."""
        repository = copy_repository(tmp_path)
        repository.edit("fixtures/provided.py", "    switches.keep_precision()\n", "")
        repository.edit("fixtures/plugin.py", "    keep_precision()", "    _ = keep_precision")
        repository.write_checks(
            """
            from fixtures.numerics.formats import BF16, FP32

            class TestOp:
                @pytest.mark.parametrize("fmt", [BF16, FP32], ids=lambda fmt: fmt.name)
                def test_held(self, check, device, fmt):
                    check.exact(float(torch.ones(1, device=device.torch)), 1.0)
            """
        )
        ended = repository.run("-m", "h100", "--pretend", "h100", CUDA_VISIBLE_DEVICES="0")
        assert ended.code == 22, ended.text
        assert "1 passed, 1 skipped" in ended.text
        assert "fp32 convolutions round their factors, whatever torch is told: unset" in ended.text
