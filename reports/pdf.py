"""``report.pdf``: the page's findings on paper, the long lists cut. Needs no torch."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fixtures.nodes import PROMISES
from reports.findings import Finding, Findings, all_moves
from reports.heat import HeatMap
from reports.indicators import Indicator
from reports.page import figure_text

if TYPE_CHECKING:
    from fpdf import FPDF

SHOWN = 30
"""Rows of one list; the page has them all."""
MAPS = 2

_INK, _SOFT, _LINE = (28, 30, 33), (92, 96, 104), (222, 220, 213)
_TONES = {"good": (26, 107, 79), "bad": (176, 42, 28), "unsure": (138, 90, 0)}
_COLOURS = {
    "PASS": _TONES["good"],
    "REGRESSION": _TONES["bad"],
    "NONDETERMINISTIC": _TONES["bad"],
    "DRIFT": _TONES["unsure"],
    "UNVERIFIED": _TONES["unsure"],
}


def pdf(findings: Findings) -> bytes:
    """The whole file."""
    paper = _paper(findings.title)
    _top(paper, findings)
    if findings.failures:
        _heading(paper, f"{len(findings.failures)} cases failed")
        _cases(paper, findings.failures)
    met = sum(row.met for row in findings.indicators)
    _heading(paper, f"Part A: {met} of {len(findings.indicators)} indicators meet their target")
    _indicators(paper, findings.indicators)
    if findings.beyond:
        _heading(paper, "Beyond the nodes", small=True)
        _indicators(paper, findings.beyond)
    if findings.heat:
        _heading(paper, f"Part B: {findings.heat[0].finding}")
        for heat in findings.heat[:MAPS]:
            _heat(paper, heat)
    own = [action for action in findings.actions if not action.known]
    _heading(paper, "Part C: what to do" if own else "Part C: nothing has to be done")
    for action in own:
        _paragraph(paper, action.finding, bold=True)
        _paragraph(paper, action.do, mono=True)
        _paragraph(paper, action.why, soft=True)
        paper.ln(1.5)
    _heading(paper, "The matrix")
    rows = [
        [row.place, *(_cell(row.cells.get(promise)) for promise in PROMISES)]
        for row in findings.indicators
    ]
    _table(paper, [["node", *PROMISES], *rows], (22, 26, 26, 26))
    _lists(paper, findings)
    return bytes(paper.output())


def _cell(cell: Indicator | None) -> str:
    return cell.cell if cell else "-"


def _paper(title: str) -> FPDF:
    from fpdf import FPDF
    from matplotlib import get_data_path

    class Paper(FPDF):
        def footer(self) -> None:
            self.set_y(-12)
            self.set_font("DejaVu", size=7)
            self.set_text_color(*_SOFT)
            self.cell(0, 5, f"{title}   {self.page_no()} / {{nb}}", align="C")

    paper = Paper(format="A4")
    fonts = Path(get_data_path()) / "fonts" / "ttf"  # they have all signs that are used here
    for style, file in (("", "DejaVuSans"), ("B", "DejaVuSans-Bold")):
        paper.add_font("DejaVu", style, fonts / f"{file}.ttf")
    paper.add_font("Mono", "", fonts / "DejaVuSansMono.ttf")
    paper.set_margins(16, 15, 16)
    paper.set_auto_page_break(True, 16)
    paper.set_title(title)
    paper.add_page()
    return paper


def _top(paper: FPDF, findings: Findings) -> None:
    for banner in findings.banners:
        _paragraph(paper, banner, bold=True, colour=_TONES["unsure"])
        paper.ln(1)
    _paragraph(paper, f"Training precision: {findings.title}", soft=True)
    _paragraph(paper, findings.headline, bold=True, size=17, colour=_TONES[findings.tone])
    paper.ln(1)
    _paragraph(paper, f"Exit code {findings.code}, baseline: {findings.baseline}")
    for _, line, _ in findings.environment:
        _paragraph(paper, line)
    for name, value in findings.facts:
        _paragraph(paper, f"{name}: {value}", soft=True)


def _heading(paper: FPDF, text: str, *, small: bool = False) -> None:
    paper.ln(3 if small else 7)
    if paper.will_page_break(40):
        paper.add_page()
    if not small:
        paper.start_section(_legal(text))
    _paragraph(paper, text, bold=True, size=10 if small else 13)
    paper.ln(1.5)


def _paragraph(
    paper: FPDF,
    text: str,
    *,
    bold: bool = False,
    mono: bool = False,
    soft: bool = False,
    size: float = 9,
    colour: tuple[int, int, int] | None = None,
) -> None:
    paper.set_font("Mono" if mono else "DejaVu", "B" if bold else "", size - mono)
    paper.set_text_color(*(colour or (_SOFT if soft else _INK)))
    legal = _legal(text)
    paper.multi_cell(0, size * 0.5, legal, align="L", new_x="LMARGIN", new_y="NEXT")


def _table(paper: FPDF, rows: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    from fpdf.fonts import FontFace

    paper.set_font("DejaVu", size=7)
    paper.set_text_color(*_INK)
    paper.set_draw_color(*_LINE)
    with paper.table(
        col_widths=tuple(widths),
        line_height=3.6,
        padding=(0.9, 1.2, 0.9, 0),
        text_align="LEFT",
        borders_layout="HORIZONTAL_LINES",
        headings_style=FontFace(emphasis="BOLD", color=_SOFT),
    ) as table:
        for cells in rows:
            row = table.row()
            for cell in cells:
                verdict = cell.partition(" ")[0]
                colour = _COLOURS.get(verdict)
                row.cell(_legal(cell), style=FontFace(color=colour) if colour else None)


def _indicators(paper: FPDF, rows: Iterable[Indicator]) -> None:
    head = ["Indicator", "Target", "Measured", "Met", "Source of the deviation"]
    found = [
        [f"{row.title} ({row.counted})", row.target, row.measured, row.verdict, row.source]
        for row in rows
    ]
    _table(paper, [head, *found], (24, 28, 18, 16, 34))


def _heat(paper: FPDF, heat: HeatMap) -> None:
    from reports.figures import heat_figure, png

    _heading(paper, f"{heat.dtype} on {heat.device}: {heat.title}", small=True)
    figure = heat_figure(heat)
    wide, high = figure.get_size_inches()
    width = min(paper.epw, 25.4 * wide * 0.75)
    height = width * high / wide
    if paper.will_page_break(height):
        paper.add_page()
    paper.image(io.BytesIO(png(figure)), w=width)
    paper.ln(2)
    worst = sorted(heat.spots.values(), key=lambda spot: -spot.margin)[:10]
    rows = [[s.parameter, figure_text(s.margin), figure_text(s.error), s.case] for s in worst]
    _table(paper, [["largest", "error / bound", "error", "in case"], *rows], (36, 16, 16, 52))


def _cases(paper: FPDF, found: Sequence[Finding]) -> None:
    rows = [[f.verdict, f.id, f.detail.partition("\n")[0]] for f in found[:SHOWN]]
    _table(paper, [["verdict", "case", "why"], *rows], (22, 45, 53))
    _rest(paper, found)


def _lists(paper: FPDF, findings: Findings) -> None:
    if findings.drift:
        _heading(paper, f"{len(findings.drift)} cases moved inside their bounds")
        _histogram(paper, findings)
        rows = [
            [f.id, "-" if f.ulps is None else figure_text(f.ulps), figure_text(f.margin)]
            for f in findings.drift[:SHOWN]
        ]
        _table(paper, [["case", "largest move (ulp)", "error / bound"], *rows], (70, 25, 25))
        _rest(paper, findings.drift)
    if findings.changed:
        _heading(paper, "Changed in the environment")
        rows = [[f"{d} {n}", str(old), str(new)] for d, n, old, new in findings.changed]
        _table(paper, [["field", "baseline", "here"], *rows], (30, 45, 45))
    if findings.known:
        _heading(paper, "Known faults of this release")
        avoid = {a.finding: f"{a.do}: {a.why}" for a in findings.actions if a.known}
        known = [[str(count), what, avoid.get(what, "-")] for what, count, _ in findings.known]
        _table(paper, [["cases", "fault", "what avoids it"], *known], (10, 60, 50))
    if findings.unverified:
        _heading(paper, "Unverified: would have run, could not")
        rows = [
            [reason, ", ".join(f"{place} ({count})" for place, count in places)]
            for reason, places in findings.unverified
        ]
        _table(paper, [["reason", "what"], *rows], (60, 60))
    if findings.score:
        score = findings.score["score"]
        _heading(paper, f"{score['caught']} of {score['faults']} deliberate faults are caught")
    if findings.rerun:
        _heading(paper, "To measure again what failed")
        short = len(findings.rerun) < 4000
        _paragraph(paper, findings.rerun if short else "python -m pytest --lf", mono=True)


def _histogram(paper: FPDF, findings: Findings) -> None:
    moves = all_moves(findings)
    if not any(key != "0" for key in moves):
        return
    from reports.figures import histogram_figure, png

    paper.image(io.BytesIO(png(histogram_figure(moves))), w=120)
    paper.ln(2)


def _rest(paper: FPDF, found: Sequence[Finding]) -> None:
    if len(found) > SHOWN:
        _paragraph(paper, f"... and {len(found) - SHOWN} more in report.html", soft=True)


def _legal(text: str) -> str:
    """Text whose every character a font can be asked for."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
