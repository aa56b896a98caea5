"""Settings of a host: what is read of it, what is red, and that the page agrees."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fixtures import environment
from fixtures.hardening import host
from fixtures.hardening.host import Host, State
from fixtures.hardening.items import ITEMS, markdown
from fixtures.hardening.settings import EXPERIMENTS, INERT, ONE_THREAD, moved

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "environment.md").read_text()
CONTAINERFILE = (ROOT / "docs" / "examples" / "Containerfile").read_text()

Read = Callable[[Host], State]


@pytest.fixture
def root(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Makes a file system of files by their paths."""

    def make(files: dict[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


class TestVariables:
    @pytest.mark.parametrize(
        ("read", "variables", "said"),
        [
            (host.build_switches, {"USE_MKLDNN": "0"}, "USE_MKLDNN=0 does nothing"),
            (host.build_switches, {"ATEN_CPU_CAPABILITY": "AVX2"}, "in lower case"),
            (
                host.build_switches,
                {"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "SSE41"},
                "two names of one setting differ",
            ),
            (host.cublas_workspace, {"CUBLAS_WORKSPACE_CONFIG": ":8:8"}, "set :4096:8 or :16:8"),
            (
                host.allocator,
                {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"},
                "set PYTORCH_ALLOC_CONF alone",
            ),
            (
                host.nccl_errors,
                {"NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
                "the old name of the first",
            ),
            (host.overrides, {"NVIDIA_TF32_OVERRIDE": "1"}, "unset it"),
            (host.overrides, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "unset it"),
            (host.overrides, {"DNNL_DEFAULT_FPMATH_MODE": "bf16"}, "lets oneDNN round"),
            (host.overrides, {"OMP_DYNAMIC": "TRUE"}, "unset it"),
            (host.processors, {"OMP_THREAD_LIMIT": "0"}, "set OMP_NUM_THREADS=0"),
        ],
    )
    def test_that_do_harm_or_nothing_are_named_with_the_remedy(
        self, read: Read, variables: dict[str, str], said: str
    ) -> None:
        (trouble,) = read(Host(variables)).troubles
        assert all(name in trouble for name in variables)
        assert said in trouble
        assert read(Host({})).troubles == ()

    @pytest.mark.parametrize(
        ("read", "variables"),
        [
            (host.build_switches, {"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"}),
            (host.cublas_workspace, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
            (host.allocator, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}),
            (host.nccl_errors, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
            (host.overrides, {"NVIDIA_TF32_OVERRIDE": "0", "OMP_DYNAMIC": "false"}),
            (host.overrides, {"ONEDNN_DEFAULT_FPMATH_MODE": "strict"}),
            (host.processors, {"OMP_THREAD_LIMIT": "64"}),
            (host.log_level, {"TORCH_CPP_LOG_LEVEL": "0"}),
        ],
    )
    def test_that_are_right_or_harmless_are_left_alone(
        self, read: Read, variables: dict[str, str]
    ) -> None:
        state = read(Host(variables))
        assert (state.troubles, state.unverified) == ((), "")

    def test_under_an_old_name_alone_is_unverified(self) -> None:
        state = host.nccl_errors(Host({"NCCL_ASYNC_ERROR_HANDLING": "1"}))
        assert state.troubles == ()
        assert "set TORCH_NCCL_ASYNC_ERROR_HANDLING" in state.unverified

    def test_flushed_subnormals_are_found(self) -> None:
        torch.set_flush_denormal(True)
        try:
            assert "set_flush_denormal(False)" in host.overrides(Host({})).troubles[0]
        finally:
            torch.set_flush_denormal(False)


Root = Callable[[dict[str, str]], Path]


class TestFiles:
    def test_etc_environment_is_not_what_a_process_has(self, root: Root) -> None:
        text = "# NCCL_X=1\nCUDA_HOME=/cuda\nexport NCCL_ALGO=Ring\nOMP_NUM_THREADS=4\n"
        here = root({"etc/environment": text})
        (trouble,) = host.in_etc_environment(Host({"OMP_NUM_THREADS": "4"}, here)).troubles
        assert trouble.startswith("NCCL_ALGO stands in /etc/environment")
        both = Host({"OMP_NUM_THREADS": "4", "NCCL_ALGO": "Ring"}, here)
        assert host.in_etc_environment(both) == State("3 variables in /etc/environment")

    def test_an_option_that_the_driver_has_not(self, root: Root) -> None:
        path, line = "etc/modprobe.d/nvidia.conf", "options nvidia NVreg_EnableGpuFp16=0\n"
        (trouble,) = host.driver_parameter(Host({}, root({path: line}))).troubles
        assert "no option NVreg_EnableGpuFp16" in trouble

    def test_options_that_the_driver_has_are_shown(self, root: Root) -> None:
        """Whatever /proc/driver/nvidia/params calls them: this one, RmProfilingAdminOnly."""
        line = "options nvidia NVreg_RestrictProfilingToAdminUsers=0\n"
        state = host.driver_parameter(Host({}, root({"etc/modprobe.d/profiling.conf": line})))
        assert state == State("NVreg_RestrictProfilingToAdminUsers=0")

    def test_a_driver_is_read_from_what_the_kernel_says(self, root: Root) -> None:
        assert host.driver(Host({}, root({}))).unverified
        text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\n"
        here = root({"proc/driver/nvidia/version": text})
        assert host.driver(Host({}, here)) == State("kernel driver 535.129.03")

    def test_governors(self, root: Root) -> None:
        assert host.governor(Host({}, root({}))).unverified
        path = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
        here = root({path.format(0): "performance\n", path.format(1): "powersave\n"})
        assert host.governor(Host({}, here)).here == "performance, powersave on 2 CPUs"

    def test_mounts_are_those_of_the_working_folder(
        self, root: Root, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [
            "disk / ext4 rw,relatime 0 0",
            "disk {}/run ext4 rw,noatime,nobarrier 0 0",
            "disk {}/ru xfs rw 0 0",
        ]
        here = root({"run/file": ""})
        (here / "proc").mkdir()
        (here / "proc/mounts").write_text("\n".join(row.format(here) for row in rows))
        monkeypatch.chdir(here / "run")
        state = host.mounts(Host({}, here))
        assert state.here.endswith(
            "run: ext4, noatime, nobarrier: a power cut may damage a checkpoint"
        )
        assert state.troubles == ()

    def test_the_compute_cache_is_counted_where_its_variable_says(self, root: Root) -> None:
        here = root({"cache/a/1": "", "cache/b": "", "home/me/.nv/ComputeCache/c": ""})
        assert host.compute_cache(Host({"CUDA_CACHE_PATH": "/cache"}, here)).here.endswith(
            "2 files"
        )
        assert host.compute_cache(Host({"HOME": "/home/me"}, here)).here.endswith("1 files")


class TestLibraries:
    REQUIRES = ("nvidia-nccl-cu12 (==2.20.5)", "numpy", 'triton==3; extra == "x"')

    def test_pins_are_those_of_one_version_on_this_platform(self) -> None:
        assert host.pins(self.REQUIRES) == {"nvidia-nccl-cu12": "2.20.5"}

    @pytest.mark.parametrize(
        ("installed", "other"),
        [("2.20.5", False), ("2.20.5.0", False), ("2.19.3", True)],
    )
    def test_another_version_than_torch_asks_for_is_unverified(
        self, monkeypatch: pytest.MonkeyPatch, installed: str, other: bool
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.1")
        monkeypatch.setattr(host.metadata, "requires", lambda name: self.REQUIRES)
        monkeypatch.setattr(host, "_version", lambda name: installed)
        found = host.nccl(Host({}))
        assert found.troubles == ()
        assert ("pip install nvidia-nccl-cu12==2.20.5" in found.unverified) == other
        assert host.cuda(Host({})).unverified == ""  # NCCL is an item of its own

    def test_without_cuda_they_are_unverified(self) -> None:
        if torch.version.cuda is None:
            assert "without CUDA" in host.cuda(Host({})).unverified


def test_items_are_the_sixteen_each_under_a_name_of_its_own() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS) == 16


def test_the_page_holds_the_table() -> None:
    assert markdown() in PAGE


def test_variables_that_change_nothing_are_in_no_id_of_a_cpu() -> None:
    recorded = {*environment._CPU_SWITCHES, *environment._COMPILER_SWITCHES}
    assert INERT.keys() & recorded == set()


def test_variables_that_change_numbers_are_in_the_id() -> None:
    tried = {name for experiment in EXPERIMENTS for name in experiment.variables}
    assert tried - ONE_THREAD.keys() <= set(environment._CPU_SWITCHES)


def test_moved_names_the_computations_that_differ() -> None:
    assert moved({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == ["b"]


class TestContainerfile:
    def test_sets_only_variables_that_the_page_explains(self) -> None:
        names = re.findall(r"(?m)^(?:# )?ENV (.+)$", CONTAINERFILE)
        variables = {pair.partition("=")[0] for line in names for pair in line.split()}
        assert variables
        assert {name for name in variables if f"`{name}`" not in PAGE} == set()

    def test_pins_the_torch_of_the_makefile_and_the_constraints(self) -> None:
        (torch_of_makefile,) = re.findall(
            r"(?m)^TORCH\s*\?= (\S+)$", (ROOT / "Makefile").read_text()
        )
        (install,) = re.findall(r"(?m)^RUN pip install .*$", CONTAINERFILE)
        assert torch_of_makefile in install.split()
        assert "-c constraints.txt" in install

    def test_uses_instructions_that_exist(self) -> None:
        joined = CONTAINERFILE.replace("\\\n", " ")
        words = [line.split()[0] for line in joined.splitlines() if line and line[0] != "#"]
        assert words[0] == "FROM"
        assert set(words) <= {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD"}
