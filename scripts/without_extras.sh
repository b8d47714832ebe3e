#!/usr/bin/env bash
# Run the quick tests in a copy that lacks lightrft/extras: bash scripts/without_extras.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

git ls-files | grep -v -e '^lightrft/extras/' -e '^tests/extras/' | tar -cf - --files-from - | tar -xf - -C "$copy"
cd "$copy"
PYTHONPATH="$copy" python -m pytest -m "not slow" -n 2 --dist loadfile "$@"
