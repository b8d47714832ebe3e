#!/usr/bin/env bash
# Run the tests in the pinned environment, which is made first if it is missing: bash scripts/test.sh [pytest arguments]
#
# Three processes share the tests, because some tests wait for most of their time; `-n 0` runs them in one, for a debugger.
# A file stays in one process, whose tests share starts of engines and ranks; files begin in the order of tests/conftest.py.
set -euo pipefail
source "$(dirname "$0")/environment.sh" test
exec python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
