"""The package without lightrft/extras is whole: it imports, its tests pass, and it trains.

`scripts/without_extras.sh` runs all quick tests in such a copy; here are the ones about the package.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runs import PPO, prepare, rows_of

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
import sys
from pathlib import Path
from importlib import import_module

for file in sorted(Path("lightrft").rglob("*.py")):
    try:
        import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    except ModuleNotFoundError as error:
        if error.name.startswith("lightrft"):
            raise
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for name in ("lightrft", "tests", "scripts", "configs", "examples", "requirements"):
        ignored = shutil.ignore_patterns("extras", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "ARCHITECTURE.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(copy)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_every_module_is_imported_and_a_run_trains(copy, tmp_path):
    imported = run(copy, "-c", IMPORTS)
    assert imported.returncode == 0, imported.stderr

    flags = [*prepare(tmp_path), *PPO, "--max_steps=2", f"--save_path={tmp_path}/run"]
    trained = run(copy, "-m", "lightrft", "train_ppo", *flags)
    assert trained.returncode == 0, trained.stderr
    assert len(rows_of(tmp_path / "run")) == 2

    refused = {
        "--tools=calculator --apply_chat_template": "--environment, --agent and --tools: not in this installation",
        "--exact": "--exact: not in this installation",
        "--lr=1": "unknown flag --lr",
    }
    for flag, message in refused.items():
        said = run(copy, "-m", "lightrft", "train_ppo", *flags, *flag.split(), "--overwrite")
        assert said.returncode == 2 and message in said.stderr, said.stderr
    said = run(copy, "-m", "lightrft", "plan")
    assert said.returncode == 2 and "lightrft plan: not in this installation" in said.stderr


@pytest.mark.slow
def test_quick_tests_about_the_package_pass(copy):
    tests = ["tests/core", "tests/test_architecture.py"]
    passed = run(copy, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", *tests)
    assert passed.returncode == 0, passed.stdout
