#!/usr/bin/env bash
# Check on a GPU what could not be tried without one; on a machine without a network too:
#     bash scripts/gpu_check.sh [PART ...] [--device cpu] [--out folder] [--list]
# PYTHON chooses the interpreter; WHEELS=folder brings packages that it lacks. scripts/gpu_check.py explains the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python || command -v python3)}

if [[ -n ${WHEELS:-} ]]; then
    brought=$(mktemp -d)
    trap 'rm -rf "$brought"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$brought" "$WHEELS"/*.whl
    export PYTHONPATH=$brought${PYTHONPATH:+:$PYTHONPATH}
fi
"$python" scripts/gpu_check.py "$@"
