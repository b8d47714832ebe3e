"""Why: one step can be taken out alone. The core imports itself, stays small, and its example learns."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightrft.core

ROOT = Path(lightrft.core.__file__).parent
EXAMPLE = ROOT.parent.parent / "examples" / "grpo_core.py"
FILES = sorted(ROOT.glob("*.py"))
MOST_LINES = 3120
"""Lines of the core. A smaller number is an achievement, a larger one a defect; never above 4500."""
MOST_OF_EXAMPLE = 120


def imported(source: str) -> set[str]:
    """Return the modules that a source imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    return plain | {
        "." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)
    }


def foreign(source: str) -> set[str]:
    """Return what is neither the core, torch, numpy nor the standard library."""
    known = {"torch", "numpy", *sys.stdlib_module_names}
    return {
        name
        for name in imported(source)
        if name.split(".")[0] not in known and not name.startswith("lightrft.core.")
    }


def test_the_core_imports_itself_torch_and_numpy():
    wrong = {path.name: names for path in FILES if (names := foreign(path.read_text()))}
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    [
        "from lightrft.config.errors import ConfigError",
        "def f():\n    import lightrft.registry",
        "from ..config import errors",
        "from lightrft import core",
        "import transformers",
    ],
)
def test_finds_foreign_imports(source):
    assert len(foreign(source)) == 1


def test_the_core_is_small():
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= MOST_LINES


def test_the_example_is_short_and_needs_the_core_alone():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= MOST_OF_EXAMPLE and foreign(source) == set()


def test_the_example_learns_and_imports_nothing_else_of_the_package():
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
        "import grpo_core\n"
        "rewards = grpo_core.main(num_steps=20)\n"
        "assert rewards[0] < 0.2 and rewards[-1] > 0.4, rewards\n"
        "names = [name for name in sys.modules if name.startswith('lightrft.')]\n"
        "assert all(name.startswith('lightrft.core') for name in names), names\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
