"""What the suite sets so that other machines and numbers of threads stay green, or turn red."""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from fixtures import compiling
from meta_tests.running import ROOT, copy_repository, read_json

POLICY = """
    def policy_of(rank):
        return os.environ["OMP_WAIT_POLICY"]

    class TestOp:
        def test_it(self, check, ranks):
            check.exact([os.environ["OMP_WAIT_POLICY"], *ranks(policy_of, 1)], [{wanted!r}] * 2)
"""
PROPERTY = """
    from hypothesis import given, strategies

    from fixtures.examples import examples

    tried = []

    class TestBound:
        @examples(3)
        @given(strategies.integers())
        def test_it(self, number):
            tried.append(number)

        def test_that_many(self, check):
            check.exact(len(tried), {wanted})
"""


FOLDER = """
    class TestOp:
        def test_it(self):
            pytest.skip(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.parametrize("given", ["", "ACTIVE"])
def test_threads_that_wait_leave_their_core_to_ranks_and_workers(
    tmp_path: Path, given: str
) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(POLICY.format(wanted=given or "PASSIVE"))
    ended = repository.run(**({"OMP_WAIT_POLICY": given} if given else {}))
    assert ended.code == 0, ended.text


def test_compiled_code_of_another_instruction_set_is_not_taken(tmp_path: Path) -> None:
    """What AVX-512's run left on disk is wrong under AVX2, and inductor would take it."""
    repository = copy_repository(tmp_path)
    repository.write_checks(FOLDER)
    folders = []
    for given in ({}, {"ATEN_CPU_CAPABILITY": "default"}, {}, {"TORCHINDUCTOR_CACHE_DIR": "/mine"}):
        assert repository.run("--record", f"r{len(folders)}", **given).code == 0
        cases = read_json(repository.root / f"r{len(folders)}" / "cases.json")["cases"]
        folders.append(cases[0]["reason"])
    assert folders[0] == folders[2] != folders[1]
    assert folders[3] == "/mine"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_python_without_headers_compiles_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a program that is there
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # of triton
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    wanted = f"torch.compile needs Python's headers; there is no {tmp_path}/Python.h (python3-dev)"
    assert compiling.missing_compiler(kind) == wanted
    (tmp_path / "Python.h").touch()
    assert compiling.missing_compiler(kind) == ""


@pytest.mark.parametrize(("options", "wanted"), [((), 3), (("--hypothesis-profile=deep",), 5000)])
def test_a_deep_profile_tries_as_many_examples_as_it_promises(
    tmp_path: Path, options: tuple[str, ...], wanted: int
) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(PROPERTY.format(wanted=wanted))
    ended = repository.run(*options, "--record=record")
    assert ended.code == 0, ended.text
    assert list(read_json(repository.root / "record" / "verdict.json")["cases"])


def test_a_seed_chooses_the_examples(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    repository.write_checks(PROPERTY.replace("exact(len(tried), {wanted})", "observe(tried)"))
    drawn = []
    for seed in (1, 1, 2):
        options = ("--hypothesis-profile=seeded", f"--hypothesis-seed={seed}")
        cases = read_json(repository.record(*options, to=f"record-{len(drawn)}") / "cases.json")
        drawn.append([case["observed"] for case in cases["cases"]])
    assert drawn[0] == drawn[1] != drawn[2]


def test_no_check_has_a_number_of_examples_of_its_own() -> None:
    checks = (ROOT / "precision_tests").glob("*.py")
    assert [path.name for path in checks if re.search(r"\bmax_examples\b", path.read_text())] == []


def test_compiled_cases_are_written_for_one_thread_and_for_two() -> None:
    before = torch.get_num_threads(), torch._inductor.config.cpp.threads
    seen = {}
    for name, count in compiling.THREADS.items():
        with compiling.on_threads(count):
            seen[name] = (torch.get_num_threads(), torch._inductor.config.cpp.threads)
    assert seen == {"one-thread": (1, 1), "two-threads": (2, 2)}
    assert (torch.get_num_threads(), torch._inductor.config.cpp.threads) == before
    for module in ("model", "end_to_end_compiled"):
        text = (ROOT / "precision_tests" / f"test_{module}.py").read_text()
        assert "compiling.on_threads(compiling.THREADS[threads])" in text
