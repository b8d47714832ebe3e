"""Run the tests of packages that cannot share the environment of the others.

They run in an environment of their own that lies over it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(f"{sys.prefix}-extras", "bin", "python")
SEARCHED = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


FILES = [
    "tests/batching/test_transfer_queue.py",
    "tests/agents/test_verifiers.py",
    "tests/strategy/test_float8.py",
]


@pytest.mark.slow
def test_each_passes_where_its_package_is():
    assert PYTHON.exists(), (
        f"no environment at {PYTHON.parents[1]}: make it with `bash scripts/environment.sh test`"
    )
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses=0", *FILES]
    environment = os.environ | {"PYTHONPATH": SEARCHED, "RAY_prestart_worker_first_driver": "0"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    passed = re.search(r"^\d+ passed(, \d+ warnings?)? in", run.stdout, re.MULTILINE)
    assert run.returncode == 0 and passed, run.stdout[-9000:] + run.stderr[-9000:]
