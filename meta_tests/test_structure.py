"""House rules that a machine can check: imports, lengths, nodes, faults, marks."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fixtures.faults import FAULTS
from fixtures.golden import GoldenStore
from fixtures.nodes import AREA_IDS, NODE_IDS

ROOT = Path(__file__).parent.parent
PACKAGES = ("precision_tests", "fixtures", "meta_tests", "reports")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
USED_ELSEWHERE = ("numerics", "hardware_models", "training", "own_model", "distributed", "audit")
NODE_MODULES = [
    node for node in NODE_IDS if (ROOT / "precision_tests" / f"test_{node}.py").exists()
]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def within(package: str) -> list[str]:
    return [module for module in FILES if module == package or module.startswith(f"{package}.")]


# --- imports ------------------------------------------------------------------------------------


def import_statements(tree: ast.AST, *, on_loading: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """All of them, or only those that run when the module is loaded."""
    for part in ast.iter_child_nodes(tree):
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            yield part
        elif isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING":
            continue
        elif not (on_loading and isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from import_statements(part, on_loading=on_loading)


@cache
def imports_of(module: str, *, on_loading: bool = False) -> frozenset[str]:
    """Full names of what a module of ours imports, submodules taken from a package included."""
    found = set()
    for statement in import_statements(tree_of(module), on_loading=on_loading):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
        above = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
        source = ".".join(part for part in (above, statement.module) if part)
        names = {f"{source}.{alias.name}" for alias in statement.names}
        found |= {source, *(name for name in names if name in FILES)}
    return frozenset(found)


def loaded_by(module: str) -> set[str]:
    """All that loading a module of ours loads, but for what other packages load themselves."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports_of(name, on_loading=True) if name in FILES else ()
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return found


class TestImports:
    @pytest.mark.parametrize("module", within("fixtures"))
    def test_no_fixture_imports_a_check_a_meta_test_or_a_report(self, module: str) -> None:
        tops = {name.partition(".")[0] for name in imports_of(module)}
        assert tops.isdisjoint({"precision_tests", "meta_tests", "reports"})

    @pytest.mark.parametrize("module", within("fixtures.numerics"))
    def test_numerics_import_nothing_else_of_ours(self, module: str) -> None:
        ours = {name for name in imports_of(module) if name.startswith("fixtures")}
        assert [name for name in ours if not name.startswith("fixtures.numerics")] == []

    @pytest.mark.parametrize("module", within("fixtures.hardware_models"))
    def test_hardware_models_import_nothing_else_of_ours_than_numerics(self, module: str) -> None:
        ours = {name for name in imports_of(module) if name.startswith("fixtures")}
        allowed = ("fixtures.hardware_models", "fixtures.numerics")
        assert [name for name in ours if not name.startswith(allowed)] == []

    @pytest.mark.parametrize(
        "module",
        [m for p in USED_ELSEWHERE for m in within(f"fixtures.{p}")],
    )
    def test_what_ranks_and_users_load_holds_no_pytest(self, module: str) -> None:
        assert loaded_by(module).isdisjoint({"pytest", "_pytest"})

    @pytest.mark.parametrize(
        "module",
        [
            *(
                f"fixtures.{name}"
                for name in ("record", "verdict", "environment", "summary", "run")
            ),
            *within("reports"),
        ],
    )
    def test_what_reports_load_holds_no_torch(self, module: str) -> None:
        assert "torch" not in loaded_by(module)

    @pytest.mark.parametrize(
        "module",
        ["fixtures.collection", "fixtures.results", "fixtures.plugin", "reports.plugin"],
    )
    def test_what_pytest_loads_first_holds_no_torch(self, module: str) -> None:
        """Variables of threads are set before torch is loaded, which reads them once."""
        assert "torch" not in loaded_by(module)

    def test_reports_run_where_torch_cannot_be_loaded(self) -> None:
        code = "import sys; sys.modules['torch'] = None; import reports.__main__"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    @pytest.mark.parametrize(
        ("source", "on_loading", "expected"),
        [
            ("import a.b", True, {"a.b"}),
            ("def f():\n    import a", True, set()),
            ("def f():\n    import a", False, {"a"}),
            ("class C:\n    import a", True, {"a"}),
            ("if TYPE_CHECKING:\n    import a", False, set()),
            ("try:\n    import a\nexcept E:\n    pass", True, {"a"}),
        ],
    )
    def test_are_all_seen(self, source: str, on_loading: bool, expected: set[str]) -> None:
        found = import_statements(ast.parse(source), on_loading=on_loading)
        assert {alias.name for statement in found for alias in statement.names} == expected

    def test_relative_and_absolute_ones_are_the_same(self) -> None:
        assert "fixtures.numerics.formats" in imports_of("fixtures.numerics.errors")
        assert "fixtures.record" in imports_of("fixtures.check")
        assert "torch" in loaded_by("fixtures.check")


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert {module: length for module, length in lengths.items() if length > 400} == {}


# --- nodes, faults, marks -----------------------------------------------------------------------


@pytest.mark.parametrize("node", NODE_MODULES)
class TestNodes:
    @pytest.mark.parametrize("promise", ["TestBound", "TestOp", "TestFlow"])
    def test_each_holds_its_three_promises(self, node: str, promise: str) -> None:
        module = importlib.import_module(f"precision_tests.test_{node}")
        assert any(name.startswith("test_") for name in vars(getattr(module, promise)))

    def test_each_has_golden_cases_and_they_are_stored(self, node: str) -> None:
        store = GoldenStore(ROOT / "golden")
        goldens = importlib.import_module(f"precision_tests.test_{node}").GOLDEN
        assert goldens
        assert {golden.node for golden in goldens} == {node}
        stored = store.manifest[f"{node}.safetensors"]["cases"]
        assert {golden.name for golden in goldens} == set(stored)

    def test_each_has_at_least_three_faults(self, node: str) -> None:
        assert Counter(fault.node for fault in FAULTS.values())[node] >= 3

    def test_each_has_a_page_of_theory(self, node: str) -> None:
        assert len((ROOT / "docs" / "theory" / f"{node}.md").read_text().split()) > 100


def test_every_node_has_a_module_of_checks() -> None:
    modules = {path.stem for path in (ROOT / "precision_tests").glob("test_*.py")}
    assert {f"test_{node}" for node in NODE_IDS} <= modules


def test_every_fault_names_a_node_and_says_what_it_is() -> None:
    for name, fault in FAULTS.items():
        assert (name, fault.node in NODE_IDS + AREA_IDS) == (fault.name, True)
        assert len(fault.what.split()) > 3


def test_every_mark_is_registered(pytestconfig: pytest.Config) -> None:
    lines = pytestconfig.getini("markers")
    registered = {line.partition(":")[0].partition("(")[0].strip() for line in lines}
    used = {
        part.attr
        for module in FILES
        for part in ast.walk(tree_of(module))
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "pytest.mark"
    }
    assert used - registered == set()
