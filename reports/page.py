"""``report.html``: one file without network, for light and dark, wide and narrow. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fixtures.nodes import PROMISES
from reports.findings import Findings, all_moves, power_label
from reports.heat import HeatMap

if TYPE_CHECKING:
    from markupsafe import Markup

OPEN = 12
"""Rows of one kind that stand open; the others are folded."""

_SIGNS = {"PASS": "✓", "DRIFT": "≈", "REGRESSION": "✗", "NONDETERMINISTIC": "⚡"}


def page(findings: Findings) -> str:
    """The whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,  # names of cases and texts of errors are anybody's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "sign": _sign,
        "figure": figure_text,
        "spark": spark,
    }
    return templates.get_template("report.html").render(
        f=findings,
        promises=PROMISES,
        open=OPEN,
        heat=[(heat, _drawn_heat(heat, f"heat{i}")) for i, heat in enumerate(findings.heat)],
        moves=all_moves(findings),
        histogram=_drawn_moves(findings),
    )


def _sign(shown: str) -> str:
    return _SIGNS.get(shown, "?")


def figure_text(value: Any) -> str:
    """A number as a person reads it."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def spark(moves: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """A small histogram: of each power of two its label, how many moved so far, a height in %."""
    moved = sorted((key for key in moves if key != "0"), key=float)
    most = max((moves[key] for key in moved), default=1)
    return [(power_label(key), moves[key], max(8, 100 * moves[key] // most)) for key in moved]


def _drawn_heat(heat: HeatMap, name: str) -> Markup | None:
    from markupsafe import Markup

    try:
        from reports.figures import heat_figure, svg

        # matplotlib escapes what it draws.
        return Markup(svg(heat_figure(heat), name))
    except ImportError:  # the table of figures says the same
        return None


def _drawn_moves(findings: Findings) -> Markup | None:
    from markupsafe import Markup

    moves = all_moves(findings)
    if not any(key != "0" for key in moves):
        return None
    try:
        from reports.figures import histogram_figure, svg

        return Markup(svg(histogram_figure(moves), "moves"))
    except ImportError:
        return None
