"""Devices: what a GPU is called, which marks select it, and which one a worker gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fixtures import devices
from fixtures.devices import (
    CHIPS,
    CPU,
    CUDA_MARKS,
    FAMILIES,
    Device,
    Gpu,
    absent_devices,
    as_pinned,
    chip_of,
    devices_of,
    pin,
)

A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0))
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
H200 = Gpu("NVIDIA H200", (9, 0))
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9))


@pytest.mark.parametrize(
    ("product", "chip"),
    [
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("A100-SXM4-40GB", "a100"),
        # A slice is the same chip; how many multiprocessors it has stands in the environment.
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a100"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA L20", None),
        ("NVIDIA GB300", None),
    ],
)
def test_a_chip_is_read_from_the_product_name(product: str, chip: str | None) -> None:
    assert chip_of(Gpu(product, (0, 0))) == chip


@pytest.mark.parametrize("chip", CHIPS)
def test_every_listed_chip_is_itself_and_no_other(chip: str) -> None:
    assert chip_of(Gpu(f"NVIDIA {chip.upper()} 80GB", (9, 0))) == chip


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        ((7, 0), "volta"),
        ((7, 5), "turing"),
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 9), "ada"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((12, 0), "blackwell"),
        ((99, 0), None),
    ],
)
def test_a_family_is_read_from_the_compute_capability(
    capability: tuple[int, int], family: str | None
) -> None:
    assert devices.family_of(Gpu("any", capability)) == family


class TestDevices:
    def test_without_a_gpu_there_is_the_cpu(self) -> None:
        assert devices_of([]) == (CPU,)

    def test_one_per_kind_in_the_order_seen_with_its_count_and_first_index(self) -> None:
        assert devices_of([H200, A100, H200, A100, H200]) == (
            CPU,
            Device("h200", "cuda", ("cuda", "hopper", "h200"), count=3, index=0),
            Device("a100", "cuda", ("cuda", "ampere", "a100"), count=2, index=1),
        )

    def test_an_unlisted_gpu_runs_under_cuda_and_its_family(self) -> None:
        unknown = Gpu("NVIDIA Rubin R100 (preview)", (99, 0))
        assert devices_of([RTX_4090, unknown])[1:] == (
            Device("geforce_rtx_4090", "cuda", ("cuda", "ada"), index=0),
            Device("rubin_r100_preview", "cuda", ("cuda",), index=1),
        )

    def test_as_a_pinned_worker_sees_them_each_kind_has_one_counted_from_0(self) -> None:
        seen = as_pinned(devices_of([H100, H100, A100]))
        assert [(d.name, d.index, d.count) for d in seen] == [
            ("cpu", 0, 1),
            ("h100", 0, 2),
            ("a100", 1, 1),
        ]

    def test_in_torch_a_device_has_its_index(self) -> None:
        assert CPU.torch == torch.device("cpu")
        assert devices_of([A100, H100])[2].torch == torch.device("cuda", 1)

    def test_visible_gpus_are_those_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = [
            SimpleNamespace(name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1])
            for gpu in (H100, RTX_4090)
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        assert devices.visible_gpus() == (H100, RTX_4090)

    def test_simulated_gpus_need_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(devices.SIMULATED, "NVIDIA H200/9.0, NVIDIA A100-SXM4-80GB/8.0")
        assert devices.visible_gpus() == (H200, A100)


class TestAbsentDevices:
    def test_every_mark_asked_for_has_a_device_that_carries_it(self) -> None:
        stand_ins = absent_devices(CUDA_MARKS, (CPU,))
        assert [device.name for device in stand_ins] == list(CUDA_MARKS)
        assert set(CUDA_MARKS) == {"cuda", *FAMILIES, *CHIPS}
        assert all(device.name in device.marks for device in stand_ins)

    def test_a_chip_brings_its_family_and_the_reason(self) -> None:
        (stand_in,) = absent_devices(["h100", "gelu", "cpu"], devices_of([A100]))
        reason = "no h100 device is visible (visible: cpu, a100)"
        assert stand_in == Device("h100", "cuda", ("cuda", "hopper", "h100"), 0, 0, reason)
        with pytest.raises(RuntimeError, match="device h100: no h100 device is visible"):
            _ = stand_in.torch

    @pytest.mark.parametrize(
        ("asked", "gpu", "absent"),
        [
            ("h100", H100, []),
            ("hopper", H100, []),
            ("cuda", H100, []),
            ("hopper", H200, []),
            ("h100", H200, ["h100"]),
            ("ampere", H200, ["ampere"]),
            ("h200", Gpu("NVIDIA GH200 480GB", (9, 0)), ["h200"]),
            ("ada", RTX_4090, []),
        ],
    )
    def test_one_chip_never_stands_in_for_another(
        self, asked: str, gpu: Gpu, absent: list[str]
    ) -> None:
        assert [d.name for d in absent_devices([asked], devices_of([gpu]))] == absent


class TestPinning:
    @pytest.mark.parametrize(
        ("gpus", "caller", "pins"),
        [
            ([H100] * 4, None, ["0", "1", "2", "3", "0"]),
            ([H100] * 2, "5,3", ["5", "3", "5", "3", "5"]),
            ([H100] * 2, " GPU-8f1c , MIG-77aa", ["GPU-8f1c", "MIG-77aa", "GPU-8f1c"]),
            ([H100], "7", ["7", "7"]),
            ([A100, H100, A100, H100, A100], None, ["0,1", "2,3", "4,1", "0,3", "2,1", "4,3"]),
            ([H100, A100, H100], "GPU-a,2,GPU-c", ["GPU-a,2", "GPU-c,2", "GPU-a,2"]),
            # What follows an entry that does not exist is invisible to CUDA.
            ([H100], "0,-1,1", ["0", "0"]),
        ],
    )
    def test_spreads_workers_over_the_callers_own_entries(
        self, gpus: list[Gpu], caller: str | None, pins: list[str]
    ) -> None:
        assert [pin(worker, gpus, caller) for worker in range(len(pins))] == pins

    def test_gives_each_worker_one_of_each_kind_in_the_order_of_its_devices(self) -> None:
        gpus = [H100, A100, A100, H200]
        for worker in range(6):
            chosen = [gpus[int(entry)] for entry in pin(worker, gpus, None).split(",")]
            assert [d.name for d in devices_of(chosen)] == [d.name for d in devices_of(gpus)]
