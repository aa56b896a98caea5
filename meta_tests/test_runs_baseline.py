"""Runs against a baseline: PASS, DRIFT, REGRESSION, NONDETERMINISTIC, and what cannot be one."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from meta_tests.running import Repository, change_json, copy_repository, read_json

# Measures what a file says, and leaves a line per process that did so.
FROM_A_FILE = """
    from fixtures.numerics.bounds import Bound

    class TestOp:
        def test_stored(self, check, device):
            with open("processes", "a") as seen:
                print(os.getpid(), file=seen)
            got = torch.tensor([float.fromhex(open("value").read())])
            check.within(got, torch.ones(1), Bound(0.5, "half", "made up"))

        def test_constant(self, check, device):
            check.exact(1, 1)
"""
ONE, NEXT, FAR = "0x1p0", "0x1.000002p0", "0x1p1"  # the second is one fp32 ulp above the first


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Checks of a value in a file, recorded in ``baseline`` with the value 1."""
    repository = copy_repository(tmp_path)
    repository.write_checks(FROM_A_FILE)
    store(repository, ONE)
    repository.record(to="baseline")
    (repository.root / "processes").unlink()
    return repository


def store(repository: Repository, value: str) -> None:
    (repository.root / "value").write_text(value)


def change_environment(repository: Repository) -> None:
    cases = repository.root / "baseline" / "cases.json"
    environment = read_json(cases)["environment"]
    environment["cpu"] |= {"threads": 7}
    change_json(cases, environment=environment)


def verdicts(record: Path) -> dict[str, str]:
    cases = read_json(record / "verdict.json")["cases"]
    return {case_id: judged["verdict"] for case_id, judged in cases.items()}


# --- verdicts -----------------------------------------------------------------------------------


def test_the_same_bits_pass(repository: Repository) -> None:
    ended = repository.run("--baseline", "baseline")
    assert ended.code == 0
    assert "precision: baseline baseline\n" in ended.text
    latest = repository.root / "reports" / "runs" / "latest"
    assert set(verdicts(latest).values()) == {"PASS"}
    assert read_json(latest / "verdict.json")["baseline"] == "baseline"
    assert len((repository.root / "processes").read_text().split()) == 1


def test_other_bits_that_repeat_in_the_same_environment_are_a_regression(
    repository: Repository,
) -> None:
    store(repository, NEXT)
    ended = repository.run("--baseline", "baseline", "--record", "moved")
    assert ended.code == 1
    assert re.search(
        "REGRESSION +weight_update/op/stored/cpu: bits moved by up to 1 ulp though nothing that is "
        "recorded of the environment changed",
        ended.text,
    )
    assert verdicts(repository.root / "moved") == {
        "weight_update/op/stored/cpu": "REGRESSION",
        "weight_update/op/constant/cpu": "PASS",
    }
    first, again = (repository.root / "processes").read_text().split()
    assert first != again, "measured again in a process of its own"


def test_bits_that_differ_every_time_are_nondeterministic(repository: Repository) -> None:
    repository.write_checks(
        """
        class TestOp:
            def test_stored(self, check, device):
                check.observe(os.urandom(8).hex())
        """
    )
    repository.record(to="random")
    # From a folder below, as tests are named relative to the repository's root.
    below = Repository(repository.root / "precision_tests")
    ended = below.run("test_weight_update.py", "--baseline", "../random", "--record", "../moved")
    assert ended.code == 21
    assert verdicts(repository.root / "moved") == {
        "weight_update/op/stored/cpu": "NONDETERMINISTIC"
    }
    assert "and again in a fresh process" in ended.text


def test_other_bits_in_another_environment_are_drift_that_policy_may_fail(
    repository: Repository,
) -> None:
    change_environment(repository)
    store(repository, NEXT)
    ended = repository.run("--baseline", "baseline", "--record", "moved")
    assert ended.code == 0
    assert "weight_update/op/stored/cpu: inside its bound, bits moved by up to 1 ulp" in ended.text
    assert "changed in the environment:\n  cpu threads: 7 -> 1\n" in ended.text
    assert "weight_update  -      DRIFT" in ended.text
    compared = repository.run("compare", "baseline", "moved", module="reports")
    assert compared.code == 0
    assert "1 cases moved inside their bounds, 1 did not move" in compared.text

    repository.edit("pyproject.toml", "drift_fails = false", "drift_fails = true")
    failed = repository.run("--baseline", "baseline")
    assert failed.code == 20
    assert "verdict: DRIFT, and policy fails it (exit code 20)" in failed.text


def test_outside_the_bound_is_a_regression_whatever_the_environment(repository: Repository) -> None:
    change_environment(repository)
    store(repository, FAR)
    ended = repository.run("--baseline", "baseline")
    assert ended.code == 1
    assert "weight_update op stored [cpu]: outside its bound by a factor of 2\n" in ended.text


def test_a_case_missing_from_a_whole_run_is_unverified(repository: Repository) -> None:
    repository.edit("precision_tests/test_weight_update.py", "def test_constant", "def constant")
    whole = repository.run("--baseline", "baseline", "--record", "whole")
    assert whole.code == 22
    assert verdicts(repository.root / "whole") == {
        "weight_update/op/stored/cpu": "PASS",
        "weight_update/op/constant/cpu": "UNVERIFIED",
    }
    assert "the baseline has this case, this run has not: weight_update op (1)" in whole.text
    assert "not comparable with the baseline (1):" in whole.text, "the check's module changed"
    narrowed = repository.run("--baseline", "baseline", "-k", "stored")
    assert narrowed.code == 0


def test_known_faults_are_counted_and_repaired_ones_listed(repository: Repository) -> None:
    rows = """KNOWN_FAULTS: tuple[KnownFault, ...] = (
        KnownFault(("weight_update/op/stored/*",), ">=2.5", "report 1", "is twice", {}),
        KnownFault(("weight_update/op/constant/*",), ">=2.5", "report 2", "was wrong", {}),
        KnownFault(("weight_update/*",), "<2.5", "report 3", "another release", {}),"""
    repository.edit("fixtures/known_faults.py", "KNOWN_FAULTS: tuple[KnownFault, ...] = (", rows)
    store(repository, FAR)
    ended = repository.run("--baseline", "none", "--record", "known")
    assert ended.code == 0
    assert "weight_update  -      PASS exact (1 known)" in ended.text
    assert re.search(
        r"each with the cases that it explains:\n +1  is twice \[report 1\]", ended.text
    )
    repaired = (
        r"REPAIRED: known faults that pass here \(1\):\n +PASS +weight_update/op/constant/cpu"
    )
    assert re.search(repaired, ended.text)


# --- what cannot be a baseline ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"schema": 0}, "has record schema 0, this suite reads 1; record it again"),
        ({"injected": "gelu_tanh_for_erf"}, "under the injected fault 'gelu_tanh_for_erf'"),
        ({"complete": False}, "is the record of an interrupted run: it cannot be a baseline"),
        ({"cases": [{}]}, "cases.json is damaged"),
    ],
    ids=["schema", "injected", "interrupted", "damaged"],
)
def test_a_record_that_cannot_serve_is_refused(
    repository: Repository, changed: dict[str, object], text: str
) -> None:
    change_json(repository.root / "baseline" / "cases.json", **changed)
    ended = repository.run("--baseline", "baseline")
    assert ended.code == 4
    assert ended.text.startswith("ERROR: --baseline: ")
    assert text in ended.text


def test_a_record_without_its_tensors_is_refused_everywhere(repository: Repository) -> None:
    shutil.copytree(repository.root / "baseline", repository.root / "whole")
    tensors = repository.root / "baseline" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    refused = [
        repository.run("--baseline", "baseline"),
        repository.run("compare", "whole", "baseline", module="reports"),
        repository.run("exit-code", "baseline", module="reports"),
    ]
    for ended in refused:
        assert ended.code == 4
        assert "baseline/tensors.safetensors cannot be read" in ended.text
    assert repository.run("exit-code", "nowhere", module="reports").code == 4


def test_an_upgrade_from_no_torch_names_the_interpreter(repository: Repository) -> None:
    ended = repository.run("upgrade", "no/such/python", module="reports")
    assert ended.code == 4
    assert "error: no/such/python cannot load torch (" in ended.text


def test_an_upgrade_is_two_runs_and_a_table_of_what_moved(repository: Repository) -> None:
    ended = repository.run("upgrade", sys.executable, "-n", "0", module="reports")
    assert ended.code == 0
    assert "2 did not move" in ended.text
    assert f"== torch {torch.__version__} -> {torch.__version__}\n\n" in ended.text
    [folder] = (repository.root / "reports" / "runs").glob("upgrade-*")
    assert read_json(folder / "new" / "verdict.json")["baseline"].endswith("/old")
