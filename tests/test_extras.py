"""Run the tests of packages that cannot share the environment of the others.

They run in environments of their own that lie over it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEARCHED = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


FILES = {
    "extras": [
        "tests/strategy/batching/test_transfer_queue.py",
        "tests/extras/agents/test_verifiers.py",
        "tests/extras/agents/test_mcp.py",
    ],
    "fp8": ["tests/strategy/test_float8.py"],
    "tinker": ["tests/extras/tinker/test_tinker_server.py"],
}
"""Environment -> tests of the packages in it."""


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", FILES)
def test_each_passes_where_its_package_is(name: str) -> None:
    python = Path(f"{sys.prefix}-{name}", "bin", "python")
    assert python.exists(), (
        f"no environment at {python.parents[1]}: make it with `bash scripts/environment.sh test`"
    )
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses=0"]
    command += FILES[name]
    environment = os.environ | {"PYTHONPATH": SEARCHED, "RAY_prestart_worker_first_driver": "0"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    passed = re.search(r"^\d+ passed(, \d+ warnings?)? in", run.stdout, re.MULTILINE)
    assert run.returncode == 0 and passed, run.stdout[-9000:] + run.stderr[-9000:]
