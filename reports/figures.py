"""The drawn parts of a report, as SVG for the page and PNG for the PDF. Needs no torch.

Colours come from cividis, which people with and without colour-blindness order alike, and every
cell carries its figure. Text and lines of an SVG take the colour of the text around it, so one
drawing serves light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports.findings import power_label
from reports.heat import OUTSIDE, HeatMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#010203"  # stands for the colour of the text around an SVG
_DARK = "#101010"  # on a light cell, whatever the page's colours
_CELL = 0.34  # inches a row takes
_TOP = 0.5  # the scale's least end: where all is well nothing glows
_LONGEST = 40  # characters of a name
_PLURAL = {"weight": "weights", "bias": "biases"}


def heat_figure(heat: HeatMap) -> Figure:
    """Modules by layers: weights, biases, and what lies outside the blocks, on one scale."""
    from matplotlib.figure import Figure

    blocks = [layer for layer in heat.layers if layer != OUTSIDE]
    panels = [
        (kind, sorted({m for layer, m in heat.spots if layer in blocks and _is(m, kind)}), blocks)
        for kind in ("weight", "bias")
    ]
    own = [module for layer, module in heat.spots if layer == OUTSIDE]
    panels = [panel for panel in panels if panel[1]]
    rows = max([len(modules) for _, modules, _ in panels] + [len(own)])
    widths = [max(1.4, 0.55 * len(layers)) for _, _, layers in panels] + [0.8] * bool(own)
    labels = [modules for _, modules, _ in panels] + [own] * bool(own)
    beside = sum(0.3 + 0.075 * max(len(_short(name)) for name in names) for names in labels)
    size = (sum(widths) + beside + 0.9, _CELL * rows + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    # Up to the worst finite margin: what stands out below the limit is to be seen.
    top = max(_TOP, *(s.margin for s in heat.spots.values() if math.isfinite(s.margin)))
    image: Any = None
    for axis, (kind, modules, layers) in zip(axes, panels, strict=False):
        names = [module.removesuffix(f".{kind}") for module in modules]
        short = [layer.removeprefix("block ") for layer in layers]
        image = _grid(axis, heat, modules, layers, names, short, top)
        axis.set_title(f"{_PLURAL[kind]}, by block", fontsize=10)
    if own:
        image = _grid(axes[-1], heat, own, [OUTSIDE], own, [""], top)
        axes[-1].set_title("outside blocks", fontsize=10)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.05, aspect=25, label="error / bound")
    bar.outline.set_visible(False)
    return figure


def _short(name: str) -> str:
    """A name as it is drawn: in signs that every font has; the table has it whole."""
    drawn = "".join(c if c.isascii() and c.isprintable() else "?" for c in name)
    return drawn if len(drawn) <= _LONGEST else f"{drawn[:8]}...{drawn[11 - _LONGEST :]}"


def _is(module: str, kind: str) -> bool:
    return module.endswith(".bias") == (kind == "bias")


def _grid(
    axis: Axes,
    heat: HeatMap,
    modules: Sequence[str],
    layers: Sequence[str],
    names: Sequence[str],
    columns: Sequence[str],
    top: float,
) -> Any:
    import numpy as np
    from matplotlib.patches import Rectangle

    margins = np.full((len(modules), len(layers)), np.nan)
    for row, module in enumerate(modules):
        for column, layer in enumerate(layers):
            if spot := heat.spots.get((layer, module)):
                margins[row, column] = spot.margin
    shown = np.where(np.isinf(margins), top, margins)
    image = axis.imshow(shown, cmap="cividis", vmin=0, vmax=top, aspect="auto")
    axis.set_xticks(range(len(layers)), columns, fontsize=9)
    axis.set_yticks(range(len(modules)), [*map(_short, names)], fontsize=9, parse_math=False)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    small = len(layers) > 12
    for (row, column), margin in np.ndenumerate(margins):
        if np.isnan(margin):
            continue
        ink = _DARK if shown[row, column] > 0.47 * top else "white"
        if not small:
            text = "inf" if np.isinf(margin) else f"{margin:.2g}"
            axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
        if not margin <= 1:  # found without colours too
            axis.add_patch(
                Rectangle((column - 0.47, row - 0.44), 0.94, 0.88, fill=False, lw=2, ec=ink)
            )
    return image


def histogram_figure(moves: Mapping[str, int]) -> Figure:
    """How many kept positions moved by how many ulps; those that did not move are in the title."""
    from matplotlib.figure import Figure

    moved = {key: count for key, count in moves.items() if key != "0"}
    order = sorted(moved, key=float)
    figure = Figure(figsize=(1.2 + 0.5 * len(order), 2.3))
    axis = figure.subplots()
    axis.bar(range(len(order)), [moved[key] for key in order], color="#5b7fb5", width=0.82)
    axis.set_yscale("log")
    axis.set_ylim(0.7, 2 * max(moved.values()))
    axis.set_xticks(range(len(order)), [power_label(key) for key in order], fontsize=8)
    axis.set_xlabel("moved by up to (ulp)", fontsize=9)
    axis.set_ylabel("positions", fontsize=9)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure


def svg(figure: Figure, name: str) -> str:
    """The figure for a page: sized by the page, in the colours around it; ``name`` is unique."""
    import matplotlib as mpl

    for text in figure.findobj(lambda artist: hasattr(artist, "get_text")):
        if text.get_color() == mpl.rcParams["text.color"]:  # type: ignore[attr-defined]
            text.set_color(_INK)  # type: ignore[attr-defined]
    for axis in figure.axes:
        axis.tick_params(labelcolor=_INK, color=_INK)
        for spine in axis.spines.values():
            spine.set_edgecolor(_INK)
    target = io.StringIO()
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    ):
        figure.savefig(
            target, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    drawn = target.getvalue().replace(_INK, "currentColor")
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.S)
    # Inline drawings share one space of names.
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", drawn)


def png(figure: Figure) -> bytes:
    """The figure for paper."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=180, bbox_inches="tight")
    return target.getvalue()
