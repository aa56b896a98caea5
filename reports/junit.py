"""``junit.xml``: a test case per measured case, as CI systems read it. Needs no torch.

The form is that of Jenkins' schema (github.com/jenkinsci/xunit-plugin at 8c515de, junit-10.xsd). A
case that only a known fault explains, and one that drifted, is no failure; it says so in its
output. What is missing or could not be measured, which decides the exit code, is an error; another
UNVERIFIED case is skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree as ET

from fixtures.verdict import Judgement, Verdict
from reports.findings import Findings
from reports.indicators import FAILED

# What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(findings: Findings) -> bytes:
    """The whole file."""
    sharing = Counter(j.case.test for j in findings.judgements)
    suites: dict[str, list[ET.Element]] = {}
    for judgement in findings.judgements:
        case = judgement.case
        spent = findings.durations.get(case.test, 0.0) / sharing[case.test]
        place = f"{case.node}.{case.promise}"
        suites.setdefault(place, []).append(_case(judgement, place, spent))
    root = ET.Element("testsuites", name="training precision")
    for place in sorted(suites):
        suite = ET.SubElement(root, "testsuite", name=place)
        suite.extend(suites[place])
        _count(suite)
    _count(root)
    del root.attrib["skipped"]  # the schema has it on suites alone
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _case(judgement: Judgement, place: str, spent: float) -> ET.Element:
    case, shown = judgement.case, judgement.verdict
    name = case.id.removeprefix(f"{case.node}/{case.promise}/")
    element = ET.Element("testcase", classname=place, name=_legal(name), time=f"{spent:.3f}")
    if shown in FAILED:
        _told(element, "failure", shown.value, judgement.detail)
    elif judgement.missing or case.error:
        _told(element, "error", shown.value, judgement.detail)
    elif shown is Verdict.UNVERIFIED:
        ET.SubElement(element, "skipped", message=_legal(_first(judgement.detail)))
    elif judgement.known or shown is Verdict.DRIFT:
        said = f"{shown.value}: {judgement.known or judgement.detail}"
        ET.SubElement(element, "system-out").text = _legal(said)
    return element


def _told(element: ET.Element, tag: str, kind: str, detail: str) -> None:
    found = ET.SubElement(element, tag, type=kind, message=_legal(_first(detail)))
    found.text = _legal(detail)


def _count(element: ET.Element) -> None:
    """Numbers of the cases below, as the schema wants them on each suite."""
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        element.set(name, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.attrib['time']) for case in cases):.3f}")


def _legal(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def _first(detail: str) -> str:
    return detail.partition("\n")[0]
