"""Runs on releases that differ: a fault that outlived its row, what a release refuses or leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import known_faults
from fixtures.distributed.ranks import RanksUnavailable, unless_refused
from fixtures.known_fault import KnownFault
from fixtures.record import Case, Record, RecordError
from meta_tests.running import Repository, copy_repository, read_json
from reports import releases

WRONG = """
    class TestOp:
        def test_old(self, check, device):
            check.exact(2, 1)

        def test_new(self, check, device):
            check.exact(3, 1)
"""
FLUSHING = """
    class TestOp:
        def test_flushes(self, check, device):
            torch.set_flush_denormal(True)
            check.exact(1, 1)

        def test_subnormals(self, check, device):
            half = torch.tensor([torch.finfo(torch.float32).tiny]) / 2
            check.exact(bool(half == 0), False)
"""
ROW = """KNOWN_FAULTS: tuple[KnownFault, ...] = (
    KnownFault(
        cases=("weight_update/op/*",),
        releases=">=2.4,<=2.4.1",
        got=("2",),
        report="an issue",
        what="one is two",
    ),"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return copy_repository(tmp_path)


def test_a_fault_past_its_row_stays_red_and_is_named_in_one_line(repository: Repository) -> None:
    repository.write_checks(WRONG)
    repository.edit("fixtures/known_faults.py", "KNOWN_FAULTS: tuple[KnownFault, ...] = (", ROW)
    folder = repository.root / "record"
    ended = repository.run(f"--record={folder}")
    line = "known up to 2.4.1, still wrong here: one is two [an issue]"
    assert ended.code == 1
    assert f"\n    1  {line}\n" in ended.text
    assert "outside their bound or moved without a reason (1):" in ended.text
    words = "1 of the 2 failing cases is known of earlier releases"
    assert f"{words} (exit code 1)" in ended.text
    assert words in read_json(folder / "verdict.json")["meaning"]
    reasons = {c["name"]: c["reason"] for c in read_json(folder / "cases.json")["cases"]}
    assert reasons["old"].endswith(f"\n  {line}")
    assert "known" not in reasons["new"]
    compared = repository.run("compare", "record", "record", module="reports").text
    assert f"    1  {line}\n" in compared
    assert words in compared


def of_release(release: str, *cases: Case) -> Record:
    return Record({"cpu": {"torch": release}}, {case.id: case for case in cases})


def case(name: str, node: str = "gelu", **fields: Any) -> Case:
    return Case(node, "op", name, "cpu", **{"test": name, **fields})


def test_the_table_of_releases_is_made_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    red = {"outcome": "outside", "margin": 9.0}
    old = of_release(
        "2.6.0+cu124",
        case("known", known="a fault [issue 1]", **red),
        case("crashed-call-error", test="crashed", **red),
        case("absent", "all_reduce", outcome="unverified"),
    )
    mended = of_release("2.6.0+cu124", case("crashed", outcome="unverified"))
    new = of_release("2.10.0", case("a", figures={"outlived": "known up to 2.9"}, **red), case("b"))
    row = KnownFault(("gelu/op/since/*",), ">=2.6,<2.7", "issue 2", "seen since", got=("5",))
    monkeypatch.setattr(known_faults, "KNOWN_FAULTS", (row,))
    since = of_release(
        "2.6.0+cu124",
        case("since", figures={"wrong": ["5"]}, **red),
        case("since", dtype="bf16", test="other", figures={"wrong": ["6"]}, **red),
    )
    table = releases.lines([new, old, since, mended])
    assert table[0] == "| node | 2.6.0+cu124 | 2.10.0 |"
    old_gelu = "REGRESSION (2 known, 1 unverified, 1 red)"
    new_gelu = "REGRESSION (1 red, 1 of them known of earlier releases)"
    assert f"| gelu | {old_gelu} | {new_gelu} |" in table
    assert "| all_reduce | UNVERIFIED | - |" in table
    assert table[-1] == "| cases | 5 | 2 |"
    with pytest.raises(RecordError, match="honest records"):
        releases.lines([replace(old, injected="a_fault")])


def test_no_check_inherits_that_subnormals_are_flushed(repository: Repository) -> None:
    repository.write_checks(FLUSHING)
    ended = repository.run()
    assert ended.code == 0, ended.text


def test_a_reduction_that_a_release_refuses_is_unavailable_in_its_own_words() -> None:
    said = "Cannot use ReduceOp.AVG with Gloo"
    with pytest.raises(RanksUnavailable) as refused, unless_refused():
        raise RuntimeError(said)
    assert str(refused.value) == f"torch {torch.__version__}: {said}"
    with pytest.raises(RuntimeError, match="of another kind"), unless_refused():
        raise RuntimeError("of another kind")
