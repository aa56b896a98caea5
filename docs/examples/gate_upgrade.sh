#!/usr/bin/env bash
# Gates an upgrade of torch: records the old release, judges the new one against that record.
#
#   docs/examples/gate_upgrade.sh torch==2.13.0 torch==2.14.1
#
# Ends with the exit code of the verdict (docs/verdicts.md), which `make upgrade` cannot. The report
# lies in reports/runs/upgrade-<time>. PYTHON: the interpreter that environments are made with.
# PYTEST_ADDOPTS="-m h100" selects checks, as for pytest itself.
set -euo pipefail
[[ $# -eq 2 && $1 == torch==* && $2 == torch==* ]] || { echo "usage: $0 OLD NEW, as torch==2.13.0 torch==2.14.1" >&2; exit 4; }
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_environment() { # folder, release
    "${PYTHON:-python3}" -m venv "$1"
    "$1/bin/python" -m pip install -c constraints.txt "$2" -e .
}

make_environment "$work/old" "$1"
make_environment "$work/new" "$2"
"$work/new/bin/python" -m reports upgrade "$work/old/bin/python"
