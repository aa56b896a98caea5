"""Whole runs: what is selected, how they end, what they refuse, what they leave behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.nodes import NODE_IDS
from meta_tests.running import copy_repository, read_json

H100, H200, UNLISTED = "NVIDIA H100 80GB HBM3/9.0", "NVIDIA H200/9.0", "NVIDIA Pluto X1/9.0"


# --- how a run ends -----------------------------------------------------------------------------


def test_a_clean_run_ends_with_0_and_leaves_a_record_that_repeats(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    ended = repository.run("-k", "unscale")
    assert ended.code == 0
    assert "verdict: every verified case holds (exit code 0)" in ended.text
    assert re.search(
        r"precision: cpu: torch \S+, .*, 1 thread, environment [0-9a-f]{12}\n", ended.text
    )
    latest = repository.root / "reports" / "runs" / "latest"
    assert {path.name for path in latest.iterdir()} == {
        "cases.json",
        "tensors.safetensors",
        "run.json",
        "verdict.json",
    }
    assert read_json(latest / "verdict.json")["matrix"]["grad_scaler"]["flow"] == "-"
    assert f"= {len(read_json(latest / 'run.json')['durations'])} passed, " in ended.text

    again = repository.record("-k", "unscale", to="again")
    assert_same_records(latest, again)
    assert repository.run("exit-code", latest, module="reports").code == 0
    compared = repository.run("compare", latest, again, module="reports")
    assert compared.code == 0
    assert re.search(r"\n0 cases moved inside their bounds, \d+ did not move\n", compared.text)


def test_a_fault_reddens_its_own_node_with_a_complete_text(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "gelu", "grad_scaler")
    ended = repository.run(
        *("-k", "defaults or (test_forward and eager and fp32 and erf and not huge)"),
        *("--inject", "gelu_tanh_for_erf", "--record", "injected"),
    )
    assert ended.code == 1
    assert "INJECTED fault gelu_tanh_for_erf: this run proves a check can fail" in ended.text
    text = re.search(r"gelu op forward-erf \[cpu, fp32, eager\]:(.*\n)+?.*rerun:.*", ended.text)
    assert text is not None
    value = r"-?[\d.e+-]+ \(-?0x1\.[0-9a-f]+p[+-]\d+, bits 0x[0-9a-f]{8}\)"
    for line in (
        r"outside its bound by a factor of \d+",
        rf"worst at index \(\d+,\), x\[\d+\] = .*: got {value}, wanted {value}",
        r"error: [\d.e+-]+ = [\d.e+-]+ ulp of fp32; bias [\d.e+-]+ ulp; normwise [\d.e+-]+",
        r"bound: [\d.e+-]+, GELU \(erf\) evaluated in fp32 \+ truth stored in fp32 \[.+\]",
        r"environment: torch .*, isa \S+, threads 1, id [0-9a-f]{12}",
        r'rerun: pytest "precision_tests/test_gelu.py::TestOp::test_forward\[cpu-fp32-erf-eager\]"',
    ):
        assert re.search(line, text[0]), f"{line} not in:\n{text[0]}"

    matrix = read_json(repository.root / "injected" / "verdict.json")["matrix"]
    assert matrix["gelu"]["op"].startswith("REGRESSION")
    assert matrix["grad_scaler"]["op"] == "PASS exact"
    assert read_json(repository.root / "injected" / "cases.json")["injected"] == "gelu_tanh_for_erf"
    assert repository.run("exit-code", "injected", module="reports").code == 1

    test = re.search(r'rerun: pytest "(.*)"', text[0])
    assert test is not None
    rerun = repository.run(test[1], PRECISION_INJECT="gelu_tanh_for_erf")
    assert rerun.code == 1
    assert "1 failed" in rerun.text
    assert repository.run(test[1]).code == 0


# --- what is selected ---------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["h100", "hopper", "cuda"])
def test_a_device_that_is_asked_for_and_absent_is_unverified(tmp_path: Path, asked: str) -> None:
    repository = copy_repository(tmp_path, "gelu", "grad_scaler")
    ended = repository.run("-m", asked, "-k", "defaults or nan_in_nan_out")
    assert ended.code == 22
    reason = f"no {asked} device is visible (visible: cpu): gelu op (6), grad_scaler op (1)"
    assert f"UNVERIFIED: would have run, could not:\n  {reason}\n" in ended.text
    assert "PASS" not in ended.text


def test_an_absent_device_counts_only_where_it_was_asked_for(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "gelu", "grad_scaler")
    chosen = ("-k", "defaults or nan_in_nan_out")
    one_node = repository.run(*chosen, "-m", "h100 and gelu")
    assert one_node.code == 22
    assert "(visible: cpu): gelu op (6)\n" in one_node.text
    others = repository.run(*chosen, "-m", "not h100")
    assert others.code == 0
    assert "UNVERIFIED" not in others.text
    assert "7 passed" in others.text
    required = repository.run(*chosen, "--require", "h100")
    assert required.code == 22
    assert "7 passed, 7 skipped" in required.text


def test_a_missing_compiler_counts_only_where_it_is_required(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(
        """
        class TestOp:
            @pytest.mark.compiled
            def test_compiled(self, check):
                check.exact(1, 2)

            def test_eager(self, check):
                check.exact(1, 1)
        """
    )
    reason = (
        "torch.compile needs a C++ compiler; /none/c++ is not on the PATH: weight_update op (1)"
    )
    listed = repository.run(CXX="/none/c++")
    assert (listed.code, reason in listed.text) == (0, True)
    assert "PASS exact (1 unverified)" in listed.text
    required = repository.run("--require", "compiled", CXX="/none/c++")
    assert (required.code, reason in required.text) == (22, True)
    repository.edit("pyproject.toml", "require = []", 'require = ["compiled"]')
    assert repository.run(CXX="/none/c++").code == 22


def test_a_device_that_policy_requires_and_nobody_has_is_unverified(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")
    repository.edit("pyproject.toml", "require = []", 'require = ["h100"]')
    ended = repository.run("-k", "defaults")
    assert ended.code == 22, ended.text
    assert "no h100 device is visible" in ended.text


def test_each_kind_of_gpu_runs_under_its_chip_and_its_family(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "grad_scaler")

    def collected(*arguments: str) -> list[str]:
        gpus = ",".join((H100, H200, H100, UNLISTED))
        chosen = ("--collect-only", "-q", "-k", "defaults", *arguments)
        ended = repository.run(*chosen, PRECISION_SIMULATED_GPUS=gpus)
        return re.findall(r"test_defaults\[(\w+)\]", ended.text)

    assert collected() == ["cpu", "h100", "h200", "pluto_x1"]
    assert collected("-m", "h100") == ["h100"]
    assert collected("-m", "hopper and not h100") == ["h200", "pluto_x1"]
    assert collected("-m", "cuda") == ["h100", "h200", "pluto_x1"]
    assert collected("-m", "a100 or h200") == ["h200", "a100"]


# --- what is refused ----------------------------------------------------------------------------

NODES = ", ".join(NODE_IDS)
REFUSED: dict[str, tuple[Any, ...]] = {
    "mark": (("-m", "gelu and h1000"), "-m: unknown mark 'h1000'; known are the nodes", NODES),
    "node": (("-m", "gleu"), "-m: unknown mark 'gleu'; known are the nodes", NODES),
    "dtype": (("-m", "not fp8"), "-m: unknown mark 'fp8'", "bf16, fp16, tf32, fp32, fp64"),
    "require": (("--require", "h1000"), "--require: unknown mark 'h1000'", NODES),
    "inject": (("--inject", "gelu_late"), "unknown fault 'gelu_late'; known:", "gelu_tanh_for_erf"),
    "threads": (("--threads", "0"), "--threads 0: give a number from 1 to 1024"),
    "too many": (("--threads", "99999999999"), "--threads 99999999999: give a number from 1 to"),
    "no time": (("--rank-timeout", "nan"), "--rank-timeout nan: give seconds above 0"),
    "for ever": (("--rank-timeout", "inf"), "--rank-timeout inf: give seconds above 0, a day at"),
    "profile": (("--hypothesis-profile=dep",), "unknown profile 'dep'; known: gate, seeded, deep"),
    "no folder": (("--baseline", "pyproject.toml"), "pyproject.toml is not a record; a record is"),
    "record": (("--record", "reports"), "--record reports exists; name another folder"),
    "no record": (("--record=",), "--record= names no folder; name one that does not exist yet"),
    "in a file": (("--record", "pyproject.toml/x"), "pyproject.toml/x cannot be written; name"),
    "no model": (("-m", "gelu or model"), "name it with --model package.module:factory"),
    "file": (("--model", "a/b.py:f"), "--model a/b.py:f is not of the form package.module:name"),
    "reason": (("--reason", "why not"), "--reason goes with --golden=bless"),
    "bless": (("--golden=bless",), "--golden=bless needs --reason"),
    "nothing to bless": (("--golden=bless", "--reason=x"), "no proposal in", "--golden=propose"),
    "nothing to show": (("--golden=diff",), "no proposal in", "run pytest --golden=propose first"),
    "parallel proposal": (("--golden=propose", "-n", "2"), "leave out -n"),
    "injected proposal": (("--golden=propose", "--inject=gelu_tanh_for_erf"), "without --inject"),
    "parallel verification": (("--golden=verify", "-n", "2"), "leave out -n"),
    "baseline": (("--baseline", "nowhere"), "nowhere is not a record; a record is what --record"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, case: str) -> None:
    repository = copy_repository(tmp_path)
    before = repository.files()
    arguments, *texts = REFUSED[case]
    ended = repository.run(*arguments)
    assert ended.code == 4, ended.text
    assert ended.text.startswith("ERROR: ")
    assert [text for text in texts if text not in ended.text] == []
    assert repository.files() == before


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"PRECISION_INJECT": "gelu_late"},
            "unknown fault 'gelu_late'; known: seed_",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "launch with torchrun, or unset RANK and WORLD_SIZE"),
        (
            {"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}
            | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
            "WORLD_SIZE=two: torchrun sets a number there",
        ),
        (
            {"PRECISION_SIMULATED_GPUS": "NVIDIA H100"},
            "'NVIDIA H100' is no GPU; name it with its compute capability",
        ),
        ({"TORCHINDUCTOR_CACHE_DIR": "/proc/none"}, "compiled code cannot be kept there"),
        ({"PRECISION_SIMULATED_GPUS": H100}, "is a test aid: it needs --collect-only"),
    ],
    ids=["fault", "torchrun", "number", "capability", "code", "simulated"],
)
def test_an_environment_that_cannot_be_meant_is_refused(
    tmp_path: Path, environ: dict[str, str], text: str
) -> None:
    ended = copy_repository(tmp_path).run(**environ)
    assert ended.code == 4
    assert text in ended.text


def test_a_policy_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.edit("pyproject.toml", "drift_fails = false", 'drift_fails = "yes"')
    ended = repository.run()
    assert ended.code == 4
    assert "[tool.precision] drift_fails must be a bool, not 'yes'" in ended.text


# --- what does not change a record --------------------------------------------------------------


def test_workers_do_not_change_a_record_and_threads_show_in_it(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, "gelu", "all_reduce")
    chosen = ("-k", "fp32 and (two_ranks or (nan_in_nan_out and erf))")
    alone = repository.record(*chosen, to="alone")
    workers = repository.record(*chosen, "-n", "2", to="workers")
    assert_same_records(alone, workers)
    threads = repository.record("-k", "nan_in_nan_out", "--threads", "2", to="threads")
    assert read_json(threads / "cases.json")["environment"]["cpu"]["threads"] == 2


def assert_same_records(first: Path, second: Path) -> None:
    for name in ("cases.json", "tensors.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
