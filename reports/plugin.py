"""The pytest plugin that writes the report of a run beside its record, also of one cut short."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from fixtures import record, stash


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
