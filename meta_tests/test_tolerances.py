"""No tolerance is set by hand: each comes from a named function that states its theorem."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = [*sorted((ROOT / "precision_tests").glob("*.py")), ROOT / "fixtures/training/flow.py"]

LIMIT_POSITION = {"Bound": 0, "within": 2, "within_figures": 1, "compare": 2}
LIMIT_WORDS = {"limit", "limits", "bound", "bounds", "tol", "tolerance", "rtol", "atol"}
ERROR_WORDS = {"error", "errors", "err", "diff", "difference", "distance", "margin", "ulp", "ulps"}
TOLERANT = {"allclose", "isclose", "assert_close", "assert_allclose", "approx"}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
Fractions = set[str]


def bare_tolerances(source: str) -> list[int]:
    """Lines with a tolerance that no named function computes.

    A fraction is arithmetic on literals with a value strictly between -1 and 1 other than 0
    (``1e-5``, ``2.0**-8``), or a name that the file assigns one to. It is a bare tolerance inside

    1. what a call takes as its limit: at ``LIMIT_POSITION``, or by a keyword of ``LIMIT_WORDS``;
    2. what is assigned to a name with one of ``LIMIT_WORDS`` in it, or is its default;
    3. a comparison ``<``, ``<=``, ``>``, ``>=`` that stands in an assert, or whose sides subtract
       or have one of ``ERROR_WORDS`` in a name.

    So is a limit that is nothing but a literal other than 0, and any call of a ``TOLERANT``
    function, which brings a tolerance of its own.
    """
    tree = ast.parse(source)
    parts = list(ast.walk(tree))
    fractions: Fractions = set()
    for part in parts:
        if isinstance(part, ast.Assign) and holds_fraction(part.value, whole=True):
            fractions |= {ast.unparse(target) for target in part.targets}
    found = {
        limit.lineno
        for part in parts
        for limit in limits_in(part)
        if literal(limit) or holds_fraction(limit, fractions)
    }
    found |= {
        comparison.lineno
        for comparison in comparisons_with_an_error(tree)
        if holds_fraction(comparison, fractions)
    }
    found |= {p.lineno for p in parts if isinstance(p, ast.Call) and called(p) in TOLERANT}
    return sorted(found)


def limits_in(part: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a statement or call uses as limits."""
    named: list[tuple[str, ast.expr | None]] = []
    if isinstance(part, ast.Call):
        place = LIMIT_POSITION.get(called(part), len(part.args))
        yield from part.args[place : place + 1]
        named = [(keyword.arg or "", keyword.value) for keyword in part.keywords]
    elif isinstance(part, ast.Assign):
        named = [(ast.unparse(target), part.value) for target in part.targets]
    elif isinstance(part, (ast.AnnAssign, ast.AugAssign)):
        named = [(ast.unparse(part.target), part.value)]
    elif isinstance(part, ast.arguments):
        with_default = part.args[len(part.args) - len(part.defaults) :]
        defaults = [*part.defaults, *part.kw_defaults]
        names = [argument.arg for argument in (*with_default, *part.kwonlyargs)]
        named = list(zip(names, defaults, strict=True))
    yield from (value for name, value in named if value and words_of(name) & LIMIT_WORDS)


def comparisons_with_an_error(tree: ast.AST) -> Iterator[ast.Compare]:
    asserts = [part for part in ast.walk(tree) if isinstance(part, ast.Assert)]
    asserted = {id(part) for statement in asserts for part in ast.walk(statement)}
    for part in ast.walk(tree):
        if isinstance(part, ast.Compare) and any(isinstance(op, ORDERED) for op in part.ops):
            inside = list(ast.walk(part))
            names = [p.id if isinstance(p, ast.Name) else getattr(p, "attr", "") for p in inside]
            subtracts = any(isinstance(p, ast.Sub) for p in inside)
            if id(part) in asserted or subtracts or any(words_of(n) & ERROR_WORDS for n in names):
                yield part


def holds_fraction(part: ast.AST, names: Fractions = frozenset(), *, whole: bool = False) -> bool:
    inside = [part] if whole else ast.walk(part)
    return any(
        0 < abs(literal(inner) or 0) < 1 or (isinstance(inner, ast.Name) and inner.id in names)
        for inner in inside
    )


def literal(part: ast.AST) -> float | None:
    """The value of a number, or of arithmetic on numbers alone."""
    arithmetic = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if isinstance(part, ast.expr) and all(isinstance(p, arithmetic) for p in ast.walk(part)):
        value = eval(ast.unparse(part))
        return float(value) if isinstance(value, (int, float)) else None
    return None


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def words_of(name: str) -> set[str]:
    return set(name.lower().replace(".", "_").split("_"))


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_no_check_sets_a_tolerance_by_hand(path: Path) -> None:
    assert bare_tolerances(path.read_text()) == []


@pytest.mark.parametrize(
    "offence",
    [
        "assert x < 1e-5",
        "assert 0.01 > abs(x)",
        "assert (x <= 2.0**-8 * scale).all()",
        "check.exact(error < 1e-3, True)",
        "check.exact((got - want).abs().max() <= 2**-8, True)",
        "ok = figures.max_ulp < 1 / 2",
        "SMALL = 1e-6; assert x < SMALL",
        "def test(self):\n    small = -1e-6\n    assert x > small",
        "check.within(got, want, Bound(1e-5, 'hand', 'set'))",
        "check.within(got, want, Bound(want.abs() * 1e-5, 'hand', 'set'))",
        "check.within(got, want, Bound(4.0, 'hand', 'set'))",
        "check.within_figures(errors, {'wte': 0.01}, got)",
        "errors.compare(got, want, 2**-7, BF16)",
        "limit = want.abs() * 2.0**-24",
        "relative_tolerance: float = 0.1",
        "self.limits = [3e-4]",
        "def f(got, tol=1e-5): ...",
        "def f(got, *, a, atol=1e-5): ...",
        "f(got, want, rtol=1e-5)",
        "f(got, want, limit=3)",
        "torch.testing.assert_close(got, want)",
        "assert torch.allclose(got, want)",
        "assert got == pytest.approx(want)",
    ],
)
def test_an_offence_is_seen(offence: str) -> None:
    assert bare_tolerances(offence)


@pytest.mark.parametrize(
    "innocent",
    [
        "check.within(got * 0.5, want, bounds.rounding(want, BF16))",
        "limit = want * bounds.gamma(n + 4, FP32.unit_roundoff) / 2",
        "x = x[x.abs() < 0.125]",
        "assert scale > 0",
        "assert 0 < p <= 1",
        "optimizer = SGD(parameters, lr=0.1, momentum=0.9)",
        "assert figures.margin <= 1",
        "f(got, limit=0)",
        "def f(lr: float = 0.1) -> None: ...",
        "HALF = 0.5; x = y * HALF",
    ],
)
def test_an_innocent_line_is_not(innocent: str) -> None:
    assert bare_tolerances(innocent) == []
