"""The pytest plugin that writes the report of a run beside its record, also of one cut short."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from fixtures import journal, record, stash


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What an earlier run left that was killed; a journal's name ends with its process."""
    if stash.RUN not in config.stash:
        return []
    left = sorted((config.rootpath / "reports" / "runs").glob(f"*{journal.SUFFIX}"))
    return [
        f"precision: an earlier run was killed; python -m reports render {path}"
        for path in left
        if not _is_running(path)
    ]


def _is_running(path: Path) -> bool:
    try:
        os.kill(int(path.stem.rpartition("-")[2]), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """After the record is written, before the text that a run ends with.

    Workers of xdist and the other ranks of a launch have no run.
    """
    outcome = yield
    run = session.config.stash.get(stash.RUN, None)
    if run is None or run.written is None or session.config.option.report == "none":
        return outcome
    from reports import findings, writing

    folder = run.written
    try:
        found = findings.find(
            record.read(folder), title=folder.name, score=writing.score_beside(folder)
        )
        run.notes += writing.write(found, folder)
        run.notes.append(f"report: {folder / 'report.html'}")
    except Exception as error:  # a report that fails must not hide what the checks found
        what = f"{type(error).__name__}: {error}"
        run.notes.append(f"no report ({what}); see python -m reports render {folder}")
    return outcome
