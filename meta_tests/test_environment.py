"""The environment: what changes numbers is in it, and nothing else."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures import environment
from fixtures.devices import CPU, Device
from fixtures.environment import changed_fields, describe, environment_id, one_line

H200 = Device("h200", "cuda", ("cuda", "hopper", "h200"))
BACKENDS: Any = torch.backends


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch and the driver say of one H200, on a machine without a GPU."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    monkeypatch.setattr(environment, "_driver_version", lambda: "580.95.05")
    return properties


def cpu_fields() -> dict[str, Any]:
    return describe([CPU])["cpu"]


class TestId:
    def test_is_the_same_for_two_calls(self) -> None:
        first, second = cpu_fields(), cpu_fields()
        assert first == second
        assert environment_id(first) == environment_id(second)
        assert re.fullmatch(r"[0-9a-f]{12}", environment_id(first))

    def test_is_the_same_in_every_process_and_order(self) -> None:
        assert environment_id({"torch": "2.13.0", "threads": 1}) == "a13fcb1951cc"
        assert environment_id({"threads": 1, "torch": "2.13.0"}) == "a13fcb1951cc"
        assert environment_id({"torch": "2.13.0", "threads": 2}) != "a13fcb1951cc"

    def test_does_not_depend_on_host_folder_user_or_time(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        before = cpu_fields()
        monkeypatch.chdir(tmp_path)
        for variable in ("HOME", "TMPDIR", "USER", "PWD"):
            monkeypatch.setenv(variable, str(tmp_path))
        monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
        monkeypatch.setattr(platform, "node", lambda: "another-host")
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert cpu_fields() == before

    @pytest.mark.usefixtures("fake_gpu")
    def test_holds_no_host_path_or_time(self) -> None:
        text = json.dumps(describe([CPU, H200]))
        here = (platform.node(), Path.cwd(), Path.home(), sys.prefix, sys.executable)
        assert [place for place in map(str, here) if place in text] == []
        assert not re.search(r"\d\d:\d\d|\d{4}-\d\d-\d\d", text)

    @pytest.mark.usefixtures("fake_gpu")
    def test_fields_are_plain_values(self) -> None:
        for fields in describe([CPU, H200]).values():
            assert json.loads(json.dumps(fields)) == fields
            assert not any(isinstance(value, (dict, list)) for value in fields.values())


@pytest.mark.parametrize(
    ("flags", "switches", "isa"),
    [
        ("avx2 avx512f avx512bw avx512vl avx512dq", {}, "avx512"),
        ("avx2 avx512f avx512bw avx512vl avx512dq", {"ATEN_CPU_CAPABILITY": "avx2"}, "avx512"),
        ("avx2 avx512f avx512bw avx512vl avx512dq", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "narrower"),
        ("avx2 avx512f avx512bw avx512vl avx512dq", {"DNNL_MAX_CPU_ISA": "sse41"}, "narrower"),
        (
            "avx2 avx512f avx512bw avx512vl avx512dq",
            {"ONEDNN_MAX_CPU_ISA": "avx512_core", "DNNL_MAX_CPU_ISA": "AVX2"},
            "avx512",
        ),
        ("avx2 avx512f avx512bw avx512vl avx512dq", {"ONEDNN_MAX_CPU_ISA": "odd"}, "avx512"),
        ("avx2 avx512f", {}, "narrower"),
    ],
)
def test_the_width_of_onednn_is_that_of_the_cpu_up_to_its_own_switch(
    monkeypatch: pytest.MonkeyPatch, flags: str, switches: dict[str, str], isa: str
) -> None:
    monkeypatch.setattr(environment, "_cpu_flags", lambda: set(flags.split()))
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    assert cpu_fields()["onednn_isa"] == isa


# Switches that reach the CPU's results, and those of a GPU: how they are set, before and now.
# Per-backend precisions came with torch 2.9.
PER_BACKEND = hasattr(BACKENDS.cuda.matmul, "fp32_precision")
since_2_9 = pytest.mark.skipif(not PER_BACKEND, reason="this torch has no fp32_precision")


def assign(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


CPU_SWITCHES = [
    ("threads", torch.set_num_threads, 1, 2),
    ("deterministic_algorithms", torch.use_deterministic_algorithms, False, True),
    ("float32_matmul_precision", torch.set_float32_matmul_precision, "highest", "medium"),
    ("default_dtype", torch.set_default_dtype, torch.float32, torch.float64),
    ("flushes_denormals", torch.set_flush_denormal, False, True),
    ("mkldnn_enabled", assign(BACKENDS.mkldnn, "enabled"), True, False),
    ("sdpa_flash", torch.backends.cuda.enable_flash_sdp, True, False),
    ("sdpa_mem_efficient", torch.backends.cuda.enable_mem_efficient_sdp, True, False),
    ("sdpa_math", torch.backends.cuda.enable_math_sdp, True, False),
    ("sdpa_cudnn", torch.backends.cuda.enable_cudnn_sdp, True, False),
    (
        "sdpa_math_in_16_bit",
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        False,
        True,
    ),
]
GPU_SWITCHES = [
    ("tf32_matmul", assign(BACKENDS.cuda.matmul, "allow_tf32"), False, True),
    ("tf32_cudnn", assign(BACKENDS.cudnn, "allow_tf32"), True, False),
    ("cudnn_deterministic", assign(BACKENDS.cudnn, "deterministic"), False, True),
    ("cudnn_benchmark", assign(BACKENDS.cudnn, "benchmark"), False, True),
    (
        "fp16_reduced_reduction",
        assign(BACKENDS.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        True,
        False,
    ),
    (
        "bf16_reduced_reduction",
        assign(BACKENDS.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        True,
        False,
    ),
]


class TestSwitches:
    @pytest.mark.parametrize(("field", "switch", "old", "new"), CPU_SWITCHES)
    def test_of_the_cpu_change_its_id(
        self, field: str, switch: Callable[[Any], object], old: Any, new: Any
    ) -> None:
        self.assert_seen(CPU, field, switch, old, new)

    @pytest.mark.usefixtures("fake_gpu")
    @pytest.mark.parametrize(("field", "switch", "old", "new"), GPU_SWITCHES)
    def test_of_a_gpu_change_its_id(
        self, field: str, switch: Callable[[Any], object], old: Any, new: Any
    ) -> None:
        self.assert_seen(H200, field, switch, old, new)

    @staticmethod
    def assert_seen(
        device: Device, field: str, switch: Callable[[Any], object], old: Any, new: Any
    ) -> None:
        switch(old)
        before = describe([device])[device.name]
        try:
            switch(new)
            now = describe([device])[device.name]
        finally:
            switch(old)
        assert field in changed_fields(before, now)
        assert environment_id(now) != environment_id(before)
        assert describe([device])[device.name] == before

    @since_2_9
    @pytest.mark.usefixtures("fake_gpu")
    @pytest.mark.parametrize(
        ("where", "backend", "new"),
        [(CPU, "mkldnn", "bf16"), (H200, "cuda", "tf32")],
        ids=["cpu", "h200"],
    )
    def test_of_one_backend_alone_change_its_id(
        self, where: Device, backend: str, new: str
    ) -> None:
        """Torch then refuses to name a common setting; the description must not fail for it."""
        matmul = getattr(BACKENDS, backend).matmul
        old, before = matmul.fp32_precision, describe([where])[where.name]
        try:
            matmul.fp32_precision = new
            changed = changed_fields(before, describe([where])[where.name])
        finally:
            matmul.fp32_precision = old
        assert changed["matmul_fp32_precision"] == ("ieee", new)
        assert changed["float32_matmul_precision"] == ("highest", "set per backend")

    @pytest.mark.usefixtures("fake_gpu")
    @pytest.mark.parametrize(
        ("where", "variable"),
        [
            *((CPU, name) for name in environment._CPU_SWITCHES),
            *((H200, name) for name in environment._CUDA_SWITCHES),
            (CPU, "TORCHINDUCTOR_USE_FAST_MATH"),
            (H200, "CUBLAS_EMULATE_SINGLE_PRECISION"),
            (H200, "NCCL_P2P_LEVEL"),
        ],
        ids=lambda parameter: str(getattr(parameter, "name", parameter)),
    )
    def test_in_variables_change_the_id(
        self, monkeypatch: pytest.MonkeyPatch, where: Device, variable: str
    ) -> None:
        monkeypatch.delenv(variable, raising=False)
        before = describe([where])[where.name]
        monkeypatch.setenv(variable, "a-value")
        now = describe([where])[where.name]
        assert changed_fields(before, now) == {variable: (None, "a-value")}

    def test_list_the_variables_that_choose_an_arithmetic(self) -> None:
        assert "ATEN_CPU_CAPABILITY" in environment._CPU_SWITCHES
        assert {"NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "CUBLAS_WORKSPACE_CONFIG"} <= set(
            environment._CUDA_SWITCHES
        )


class TestDevices:
    def test_a_gpu_is_described_by_chip_driver_and_libraries(self, fake_gpu: Any) -> None:
        fields = describe([CPU, H200])["h200"]
        expected = {
            "gpu": "NVIDIA H200",
            "capability": "9.0",
            "multiprocessors": 132,
            "driver": "580.95.05",
            "cuda": "13.0",
            "cudnn": 91300,
            "nccl": "2.27.7",
        }
        assert {name: fields[name] for name in expected} == expected
        assert "isa" not in fields

    def test_a_slice_of_a_chip_is_another_environment(self, fake_gpu: Any) -> None:
        whole = describe([H200])["h200"]
        fake_gpu.multi_processor_count = 16
        assert changed_fields(whole, describe([H200])["h200"]) == {"multiprocessors": (132, 16)}

    def test_an_absent_device_has_no_environment(self) -> None:
        absent = Device("h100", "cuda", ("cuda",), 0, 0, "no h100 device is visible")
        assert list(describe([CPU, absent])) == ["cpu"]

    def test_the_cpu_is_described_by_model_and_isa(self) -> None:
        fields = cpu_fields()
        assert fields["isa"] == torch.backends.cpu.get_cpu_capability().lower()
        assert fields["cpu"]
        assert fields["threads"] == torch.get_num_threads()

    def test_without_a_compiler_the_description_says_so(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", os.devnull)
        environment._compiler.cache_clear()
        try:
            assert cpu_fields()["cxx_compiler"] is None
        finally:
            environment._compiler.cache_clear()


def test_changed_fields_name_what_differs_on_either_side() -> None:
    old, new = {"same": 1, "moved": "a", "gone": True}, {"same": 1, "moved": "b", "came": 0}
    expected = {"came": (None, 0), "gone": (True, None), "moved": ("a", "b")}
    assert changed_fields(old, new) == expected
    assert changed_fields(old, old) == {}


def test_one_line_is_what_a_person_wants_under_a_failure() -> None:
    fields = {"threads": 1, "isa": "avx2", "cuda": None, "torch": "2.13.0", "cudnn": 91300}
    expected = f"torch 2.13.0, isa avx2, threads 1, id {environment_id(fields)}"
    assert one_line(fields) == expected
    gpu = {"torch": "2.13.0", "gpu": "NVIDIA H200", "driver": "580.95.05", "cuda": "13.0"}
    assert one_line(gpu).startswith(
        "torch 2.13.0, gpu NVIDIA H200, driver 580.95.05, cuda 13.0, id"
    )
