"""Loads the suite's pytest plugin."""

from pathlib import Path

import pytest

import fixtures

# Another distribution on the package index installs a package of the same name.
_OURS = Path(__file__).parent / "fixtures" / "__init__.py"
if fixtures.__file__ is None or Path(fixtures.__file__).resolve() != _OURS.resolve():
    pytest.exit(
        f"the package 'fixtures' was imported from {fixtures.__file__}, not from {_OURS}: another "
        "distribution of that name comes first; remove it with 'pip uninstall fixtures', or run "
        "pytest from a clean environment",
        returncode=4,
    )

pytest_plugins = [
    "fixtures.collection",
    "fixtures.results",
    "fixtures.plugin",
    "reports.plugin",
]
