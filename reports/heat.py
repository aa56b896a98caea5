"""Part B: where in the model gradients deviate, as layers by modules. Needs no torch.

The flow checks hold the gradient of every parameter to its own bound; a heat map shows of each
parameter the worst error over bound among the cases of one format. 1 is the limit; what matters
below it is which place stands out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fixtures.nodes import AREA_IDS
from fixtures.verdict import Judgement

_GRADIENT = re.compile(r"^(?:.*\bgradient(?:/| of )|step \d+, )(.+)$")
_BLOCK = re.compile(r"^(?:.*\.)?(\d+)\.(.+)$")
_FORMATS = ("fp32", "bf16", "fp16", "mixed", "fp64")
OUTSIDE = "outside blocks"


@dataclass(frozen=True)
class Spot:
    """The worst case of one parameter.

    Attributes:
        parameter: its full name.
        margin: error over bound.
        error: relative to the gradient's norm; of a gradient that is exactly 0, absolute.
        case: id of the case.
    """

    parameter: str
    margin: float
    error: float
    case: str


@dataclass(frozen=True)
class HeatMap:
    """Layers by modules for one device and format.

    Attributes:
        title: which checks it is of.
        layers, modules: rows and columns.
        spots: by (layer, module); a parameter that the model lacks has none.
    """

    title: str
    device: str
    dtype: str
    cases: int
    layers: Sequence[str]
    modules: Sequence[str]
    spots: Mapping[tuple[str, str], Spot]

    @property
    def worst(self) -> Spot:
        return max(self.spots.values(), key=lambda spot: spot.margin)

    @property
    def finding(self) -> str:
        """What the map shows, in one sentence."""
        worst = self.worst
        over = sum(not spot.margin <= 1 for spot in self.spots.values())
        source = f"{worst.parameter} reaches {worst.margin:.2g} of its bound in {worst.case}"
        if over:
            return f"{over} of {len(self.spots)} parameters are outside their bound; {source}"
        return f"All {len(self.spots)} parameters stay inside their bounds; {source}"


def heat_maps(judgements: Iterable[Judgement]) -> list[HeatMap]:
    """A map per device and format of the nodes' flows, then of each area that has any."""
    groups: dict[tuple[str, str, str], list[tuple[Judgement, dict[str, str]]]] = {}
    for judgement in judgements:
        case = judgement.case
        if judgement.known or not (gradients := _gradients(judgement)):
            continue
        title = case.node if case.node in AREA_IDS else "each node alone in a whole step"
        groups.setdefault((title, case.device, _format(case.dtype, case.name)), []).append(
            (judgement, gradients)
        )
    order = sorted(groups, key=lambda key: (key[0] in AREA_IDS, key[0], key[1], _rank(key[2])))
    return [_map(*key, groups[key]) for key in order]


def _gradients(judgement: Judgement) -> dict[str, str]:
    """Parameter by the name of the figure that is its gradient's.

    The figures of a flow are named by the parameters. Those of whole steps say which are gradients;
    the others are losses, outputs, parameters after a step, prompts.
    """
    case = judgement.case
    names = case.figures.get("margins")
    if not isinstance(names, Mapping):
        return {}
    if case.promise == "flow":
        return {name: name for name in names}
    if case.node not in AREA_IDS:
        return {}
    found = {name: _GRADIENT.match(name) for name in names if "gradient" in case.name + name}
    return {name: match[1] for name, match in found.items() if match}


def _format(dtype: str, name: str) -> str:
    """The format of a case; checks of whole steps name their policy instead."""
    named = [f for f in ("bf16", "fp16", "mixed", "fp32", "fp64") if f in name]
    return dtype or (named or ["any format"])[0]


def _rank(dtype: str) -> int:
    return _FORMATS.index(dtype) if dtype in _FORMATS else len(_FORMATS)


def _map(
    title: str, device: str, dtype: str, found: Sequence[tuple[Judgement, Mapping[str, str]]]
) -> HeatMap:
    spots: dict[tuple[str, str], Spot] = {}
    for judgement, gradients in found:
        figures = judgement.case.figures
        for name, parameter in gradients.items():
            margin, place = figures["margins"][name], _place(parameter)
            error = figures.get("errors", {}).get(name, math.nan)
            if place not in spots or not margin <= spots[place].margin:
                spots[place] = Spot(parameter, margin, error, judgement.case.id)
    layers = sorted({layer for layer, _ in spots}, key=_layer_order)
    modules = list(dict.fromkeys(module for layer in layers for module in _modules(spots, layer)))
    return HeatMap(title, device, dtype, len(found), layers, modules, spots)


def _place(parameter: str) -> tuple[str, str]:
    match = _BLOCK.match(parameter)
    return (f"block {match[1]}", match[2]) if match else (OUTSIDE, parameter)


def _layer_order(layer: str) -> tuple[bool, int]:
    return layer == OUTSIDE, int(layer.split()[1]) if layer != OUTSIDE else 0


def _modules(spots: Mapping[tuple[str, str], Spot], layer: str) -> list[str]:
    """Weights before biases, each in the alphabet's order: neighbours share their colour scale."""
    names = [module for other, module in spots if other == layer]
    return sorted(names, key=lambda name: (name.endswith(".bias"), name))
