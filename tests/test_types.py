"""basedpyright checks the types of the public API strictly, and of further modules loosely."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("basedpyright")

ROOT = Path(__file__).resolve().parent.parent
FURTHER = ("*.py", "app/cli", "data/columns", "data/reasoning_gym")
"""Parts of lightrft/ whose types are checked in the mode `basic`."""


def errors(*arguments: str) -> list[str]:
    """Return the errors in what a configuration includes, as FILE:LINE rule: message."""
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error"]
    result = subprocess.run(
        [*command, "--pythonpath", sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(result.stdout)
    assert found["summary"]["filesAnalyzed"] > 0, result.stderr
    return [
        f"{each['file']}:{each['range']['start']['line'] + 1} {each.get('rule')}: {each['message']}"
        for each in found["generalDiagnostics"]
    ]


@pytest.mark.slow
def test_the_public_api_passes_the_strict_mode():
    assert errors() == []


@pytest.mark.slow
def test_further_modules_pass_the_basic_mode(tmp_path):
    config = {
        "include": [str(ROOT / "lightrft" / part) for part in FURTHER],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "basic",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    assert errors("--project", str(tmp_path)) == []


@pytest.mark.slow
def test_an_error_is_found(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from lightrft.versions import requirements\n\nrequirements('torch')\n")
    (error,) = errors(str(wrong))
    assert error.startswith(f"{wrong}:3 reportArgumentType: ")
