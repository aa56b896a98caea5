"""Writes a report into a folder: page, PDF, summary and junit. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fixtures.files import write_whole
from reports.findings import Findings
from reports.junit import junit
from reports.markdown import markdown
from reports.page import page
from reports.pdf import pdf

WRITERS: Mapping[str, Callable[[Findings], str | bytes]] = {
    "summary.md": markdown,
    "junit.xml": junit,
    "report.html": page,
    "report.pdf": pdf,
}
"""What needs the least first: a missing library costs only the files that need it."""


def write(findings: Findings, folder: Path) -> list[str]:
    """Writes all four files; returns what could not be written, each with its remedy."""
    problems = []
    for name, writer in WRITERS.items():
        try:
            content = writer(findings)
        except ImportError as error:
            problems.append(
                f"{name} was not written: {error.name} is not installed; "
                f"pip install {_DISTRIBUTION.get(error.name or '', error.name)}"
            )
            continue
        write_whole(folder / name, content.encode() if isinstance(content, str) else content)
    return problems


_DISTRIBUTION = {"fpdf": "fpdf2"}


def score_beside(folder: Path) -> Mapping[str, Any]:
    """The detection score that ``make faults`` left beside a record; empty where there is none."""
    try:
        score: dict[str, Any] = json.loads((folder.parent / "detection.json").read_text())
    except (OSError, ValueError):
        return {}
    return score if {"score", "faults", "time", "torch"} <= score.keys() else {}
