"""What is written of a record: all files, honest headings, nothing that a name could break."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from fixtures import devices, environment, record, verdict
from fixtures.known_faults import KNOWN_FAULTS
from fixtures.nodes import NODE_IDS
from fixtures.record import Case, Record
from fixtures.verdict import EXIT_INTERRUPTED, judge_record, judgements_of, to_plain
from reports import findings, remedies, writing
from reports.findings import Findings

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {"cpu": {"torch": "2.14.1", "cpu": "EPYC", "isa": "avx512", "threads": 1}}
HOSTILE = "$\\frac{$<script>alert('x')</script>|`a`\x1b[31m&amp;]]> {{ 7777*7777 }} \N{SNOWMAN}"

FLOW = {
    "margins": {"blocks.0.mlp.up.weight": 0.25, "blocks.1.mlp.up.weight": 2.5, "head.weight": 0.1},
    "errors": {"blocks.0.mlp.up.weight": 1e-8, "blocks.1.mlp.up.weight": 1e-7, "head.weight": 0.0},
    "worst": "blocks.1.mlp.up.weight",
}


def case(name: str = "forward", **changes: Any) -> Case:
    plain = Case("gelu", "op", name, "cpu", "fp32", margin=0.5, bound="gelu_erf", test=f"t::{name}")
    return replace(plain, **changes)


def concluded(
    *cases: Case, baseline: Record | None = None, code: int = 0, **changes: Any
) -> Record:
    """A record as a run leaves it."""
    made = Record(ENVIRONMENT, {c.id: c for c in cases}, run={"host": "here"}, **changes)
    judged = judge_record(made, baseline)
    plain = {j.case.id: to_plain(j, measured=j.case.id in made.cases) for j in judged}
    return replace(made, verdict={"exit_code": code, "baseline": "none", "cases": plain})


def found(*cases: Case, **changes: Any) -> Findings:
    return findings.find(concluded(*cases, **changes), title="a run")


OUTSIDE = case("bad", margin=7.0, outcome="outside", reason="beyond by 7\n  worst at (3,)")
KNOWN = case("odd", margin=9.0, outcome="outside", reason="inf", known="a fault [issue 1]")
ABSENT = case("gone", device="h100", outcome="unverified", reason="no h100 device is visible (x)")


# --- the files ----------------------------------------------------------------------------------


def test_a_small_record_gives_all_four_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record.write(concluded(case(), OUTSIDE, KNOWN, ABSENT, code=1), folder)
    ended = render(folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    sizes = {name: (folder / name).stat().st_size for name in writing.WRITERS}
    assert list(sizes) == ["summary.md", "junit.xml", "report.html", "report.pdf"]
    assert min(sizes.values()) > 500
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF-")
    page = (folder / "report.html").read_text()
    assert "1 of 3 cases fail on torch 2.14.1: gelu" in page
    assert "python -m pytest t::bad" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(["']?http""", page)
    assert record.read(folder).cases.keys() == {c.id for c in (case(), OUTSIDE, KNOWN, ABSENT)}


def render(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that cannot load torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from reports.__main__ import main; sys.exit(main(['render', {str(folder)!r}]))"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("library", "lost"),
    [
        ("fpdf", {"report.pdf": "fpdf is not installed; pip install fpdf2"}),
        ("jinja2", {"report.html": "jinja2 is not installed; pip install jinja2"}),
        ("matplotlib", {"report.pdf": "matplotlib is not installed; pip install matplotlib"}),
    ],
)
def test_a_library_that_is_absent_costs_only_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, lost: Mapping[str, str]
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    flow = case("flow", promise="flow", figures=FLOW)
    problems = writing.write(found(flow), tmp_path)
    assert problems == [f"{name} was not written: {why}" for name, why in lost.items()]
    assert {path.name for path in tmp_path.iterdir()} == writing.WRITERS.keys() - lost.keys()
    if library == "matplotlib":
        page = (tmp_path / "report.html").read_text()
        assert "Not drawn: matplotlib is not installed" in page
        assert "blocks.1.mlp.up.weight" in page


@pytest.mark.parametrize("writer", ["summary.md", "report.html"])
def test_what_has_to_be_known_first_stands_first(writer: str) -> None:
    injected = text_of(writer, found(case(), injected="gelu_tanh_for_erf"))
    assert "INJECTED: this run was made under the deliberate fault gelu" in injected
    assert 0 < injected.index("INJECTED") < injected.index("cases hold on")
    cut = text_of(writer, found(case(), complete=False, code=EXIT_INTERRUPTED))
    assert "INCOMPLETE: the run was interrupted or crashed" in cut
    assert "Interrupted after 1 case: no verdict on torch" in cut
    assert "cases hold" not in cut


def text_of(writer: str, of: Findings) -> str:
    content = writing.WRITERS[writer](of)
    return content if isinstance(content, str) else content.decode()


# --- names that would be markup -----------------------------------------------------------------


def hostile() -> Findings:
    flow = {HOSTILE: 0.5, f"blocks.0.{HOSTILE}": 0.2}
    bad = replace(OUTSIDE, name=HOSTILE, test=HOSTILE, reason=f"{HOSTILE}\n{HOSTILE}")
    return found(
        bad,
        replace(KNOWN, known=HOSTILE),
        replace(ABSENT, reason=HOSTILE),
        case("f", promise="flow", figures={"margins": flow, "errors": flow, "worst": HOSTILE}),
        injected=HOSTILE,
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_no_name_becomes_markup_of_the_page() -> None:
    page = text_of("report.html", hostile())
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in page
    assert "60481729" not in page


def test_no_name_breaks_a_row_of_the_summary() -> None:
    text = text_of("summary.md", hostile())
    assert "<script>" not in re.sub(r"`+[^`]*`+|\\<", "", text)
    rows = [line for line in text.splitlines() if line.startswith("| gelu")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [5]


def test_no_name_breaks_the_pdf() -> None:
    assert writing.WRITERS["report.pdf"](hostile())


def test_texts_of_any_length_and_figures_of_any_size_are_written() -> None:
    figures = {"margins": {"a.0.w": float("inf"), "a.1.w": float("nan"), "a.2.w": 1e300}}
    flow = case("flow", promise="flow", figures=figures, outcome="outside", reason="x" * 100_000)
    of = found(flow, case("y" * 3000, margin=1e300, outcome="outside", reason="z " * 50_000))
    assert all(text_of(name, of) for name in ("report.html", "junit.xml"))
    assert len(text_of("summary.md", of)) < 5000
    assert writing.WRITERS["report.pdf"](of)


def test_junit_can_be_parsed_whatever_the_names() -> None:
    root = ET.fromstring(text_of("junit.xml", hostile()))
    [failure] = root.iter("failure")
    assert failure.text == f"{HOSTILE}\n{HOSTILE}".replace("\x1b", "\N{REPLACEMENT CHARACTER}")


# --- junit --------------------------------------------------------------------------------------


def test_junit_counts_what_failed_what_is_missing_and_what_was_skipped() -> None:
    lost = case("lost", promise="bound")
    new = concluded(case(), OUTSIDE, KNOWN, ABSENT, baseline=Record(ENVIRONMENT, {lost.id: lost}))
    root = ET.fromstring(text_of("junit.xml", findings.find(new, title="a run")))
    assert root.tag == "testsuites"
    numbers = ("tests", "failures", "errors", "skipped")
    assert {name: root.get(name) for name in {*root.keys()} - {"name", "time"}} == {
        "tests": "5",
        "failures": "1",
        "errors": "1",
    }
    for element in root.iter():  # milliseconds are the schema's finest
        assert re.fullmatch(r"\d+\.\d{3}", element.get("time", "0.000"))
    suites = {s.get("name"): [s.get(name) for name in numbers] for s in root}
    assert suites == {"gelu.op": ["4", "1", "0", "1"], "gelu.bound": ["1", "0", "1", "0"]}
    for element in root.iter("testcase"):
        assert {"classname", "name", "time"} == set(element.keys())
        assert {child.tag for child in element} <= {"failure", "error", "skipped", "system-out"}
    [told] = root.iter("system-out")
    assert told.text == "PASS: a fault [issue 1]"


# --- Part A, B and C ----------------------------------------------------------------------------


def test_every_node_is_an_indicator_also_when_it_was_not_measured() -> None:
    rows = found(case(), OUTSIDE).indicators
    assert [row.place for row in rows] == list(NODE_IDS)
    verdicts = {row.place: (row.verdict, row.measured) for row in rows}
    assert verdicts.pop("gelu") == ("REGRESSION", "7 of its bound")
    assert set(verdicts.values()) == {("not measured", "-")}


def test_the_heat_map_shows_the_worst_case_of_each_parameter_and_what_is_outside() -> None:
    mild = {"margins": dict.fromkeys(FLOW["margins"], 0.5), "errors": {}, "worst": "head.weight"}
    flows = [case(n, promise="flow", figures=f) for n, f in (("hot", FLOW), ("mild", mild))]
    [heat] = found(*flows, case("op", figures=FLOW)).heat
    assert (heat.layers, heat.modules) == (
        ["block 0", "block 1", "outside blocks"],
        ["mlp.up.weight", "head.weight"],
    )
    assert [spot.margin for spot in heat.spots.values()] == [0.5, 2.5, 0.5]
    assert heat.finding.startswith("1 of 3 parameters are outside their bound; blocks.1.mlp.up")


def test_heat_maps_of_whole_steps_show_gradients_alone() -> None:
    """Not the loss, outputs, prompts or parameters that the same checks hold to their bounds."""

    def whole(name: str, *figures: str) -> Case:
        margins = dict.fromkeys(figures, 0.5)
        return case(name, node="end_to_end", promise="training", figures={"margins": margins})

    maps = found(
        whole("kl", "a_prompt", "step 3"),
        whole("parameter", "step 3, head.weight"),
        whole("gradient", "step 3, blocks.0.up.weight"),
        whole("step", "loss", "gradient/norm.bias", "output/blocks.0"),
        whole("model", "loss", "output of norm", "gradient of blocks.1.up.weight"),
        whole("trace", "step19/gradient/head.weight", "step19/parameter/head.bias"),
    ).heat
    [shown] = maps
    assert sorted(spot.parameter for spot in shown.spots.values()) == [
        "blocks.0.up.weight",
        "blocks.1.up.weight",
        "head.weight",
        "norm.bias",
    ]


def test_statements_that_were_tried_are_listed_by_number() -> None:
    def tried(number: int, **changes: Any) -> Case:
        figures = {"number": number, "says": f"{HOSTILE} says", "ruling": "false", "note": "0.1"}
        return case(f"claim-{number}", node="claims", promise="whole", figures=figures, **changes)

    of = found(tried(12), tried(3, outcome="outside", reason="got true, wanted false"), case())
    assert [(s.number, s.verdict) for s in of.statements] == [(3, "REGRESSION"), (12, "PASS")]
    page = text_of("report.html", of)
    assert "2 statements about the precision of training, tried" in page
    assert "<script>alert" not in page
    assert "| 12 | " in text_of("summary.md", of)
    assert writing.WRITERS["report.pdf"](of)


def test_drift_comes_with_the_size_of_every_move() -> None:
    bits = np.arange(1000, 1100, dtype=np.uint32) + np.uint32(0x3F800000)
    moved = bits.copy()
    moved[:4] += np.array([1, 2, 3, 40], dtype=np.uint32)
    old, new = (case(observed={"y": record.observe(b, "fp32")}) for b in (bits, moved))
    before = Record({"cpu": {**ENVIRONMENT["cpu"], "torch": "2.13.0"}}, {old.id: old})
    of = findings.compare(before, concluded(new), title="a pair", baseline="old")
    [drift] = of.drift
    assert drift.moves == {"0": 96, "1": 1, "2": 1, "4": 1, "64": 1}
    assert drift.ulps == 40
    assert of.changed == [("cpu", "torch", "2.13.0", "2.14.1")]
    assert "pip install torch==2.13.0" in [action.do for action in of.actions]
    assert "<svg" in text_of("report.html", of)


def test_what_a_run_concluded_is_read_back_as_it_was(tmp_path: Path) -> None:
    lost = case("lost")
    baseline = Record(ENVIRONMENT, {lost.id: lost, case().id: case(inputs="other")})
    repaired = case("fine", known="a fault [issue 2]")
    made = concluded(case(), OUTSIDE, KNOWN, ABSENT, repaired, baseline=baseline)
    record.write(made, tmp_path / "run")
    back = {j.case.id: j for j in judgements_of(record.read(tmp_path / "run"))}
    for judgement in judge_record(made, baseline):
        assert replace(back[judgement.case.id], case=judgement.case) == judgement


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (found(OUTSIDE, code=1), ["python -m pytest --lf", "mkldnn.flags"]),
        (found(ABSENT, case(), code=22), ["python -m pytest -m h100 --record=DIR"]),
        (found(code=verdict.EXIT_GOLDEN), ["git status golden"]),
        (found(case()), []),
    ],
    ids=["failed", "unverified", "golden", "clean"],
)
def test_each_finding_has_its_action(of: Findings, expected: Sequence[str]) -> None:
    assert len(of.actions) == len(expected)
    for action, words in zip(of.actions, expected, strict=True):
        assert words in action.do


def test_a_rerun_has_the_options_that_the_run_had() -> None:
    made = concluded(OUTSIDE, code=1)
    made = replace(made, run={"options": ["--threads=2", "--model=my.model:a b"]})
    of = findings.find(made, title="a run")
    assert of.rerun == "python -m pytest t::bad --threads=2 '--model=my.model:a b'"
    assert of.actions[0].do == "python -m pytest --lf --threads=2 '--model=my.model:a b'"


def test_the_score_of_the_deliberate_faults_is_shown(tmp_path: Path) -> None:
    faults = {
        name: {"node": "gelu", "what": f"does {name}", "caught": name != "odd", "elsewhere": []}
        for name in ("tanh", "odd")
    }
    numbers = {"faults": 2, "caught": 1, "caught_at_the_right_node_only": 1, "missed": 1}
    score = {"score": numbers, "faults": faults, "time": "now", "torch": "2.14.1"}
    (tmp_path / "detection.json").write_text(json.dumps(score))
    beside = writing.score_beside(tmp_path / "run")
    of = findings.find(concluded(case()), title="a run", score=beside)
    page = text_of("report.html", of)
    assert "The checks caught 1 of 2 deliberate faults" in page
    assert re.search(r"<code>odd</code>.*does odd.*MISSED", page)
    assert "1 of 2 deliberate faults are caught" in text_of("summary.md", of)
    (tmp_path / "detection.json").write_text("{}")
    assert writing.score_beside(tmp_path / "run") == {}


# --- what the tables of remedies take for granted -----------------------------------------------

TABLES = (*remedies.FAILED, *remedies.CHANGED, *remedies.KNOWN, *remedies.UNVERIFIED)


@pytest.mark.parametrize("name", sorted({name for row in TABLES for name in row.names}))
def test_settings_exist_in_this_torch(name: str) -> None:
    module, found_there = name, []
    while module not in sys.modules:
        try:
            importlib.import_module(module)
        except ImportError:
            module, _, attribute = module.rpartition(".")
            found_there.insert(0, attribute)
    target: Any = sys.modules[module]
    for attribute in found_there:
        target = getattr(target, attribute)


def test_every_node_that_fails_has_a_remedy() -> None:
    assert [row.patterns[0] for row in remedies.FAILED] == [f"{node}/*" for node in NODE_IDS]


def test_no_row_answers_what_cannot_be_found() -> None:
    faults = [pattern for row in KNOWN_FAULTS for pattern in row.cases]
    for row in remedies.KNOWN:
        for pattern in row.patterns:
            assert any(fnmatchcase(fault, pattern) for fault in faults), pattern
    fields = environment.describe([devices.CPU])["cpu"]
    source = Path(environment.__file__).read_text()
    known = {*fields, *re.findall(r'"([A-Za-z0-9_]+)"', source), "hosts", "sdpa_flash"}
    known |= {"matmul_fp32_precision", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}
    for row in remedies.CHANGED:
        for pattern in row.patterns:
            assert any(fnmatchcase(name, pattern) for name in known), pattern
