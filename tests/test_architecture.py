"""Rules of the package that can be read from its source: imports, sizes of folders, names."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lightrft.config import SECTIONS, section_of_field
from lightrft.config.extras import installed

ROOT = Path(__file__).resolve().parent.parent / "lightrft"
FILES = sorted(ROOT.rglob("*.py"))

SHELVES = (
    "core",
    "versions",
    "registry",
    "config",
    "models",
    "data",
    "engine",
    "strategy",
    "algorithms",
    "rewards",
    "app",
    "extras",
    "__main__",
)
"""Folders and files at the top: each imports only what stands before it."""
MOST_FOLDERS = 10
OPTIONAL = {
    "deepspeed",
    "vllm",
    "sglang",
    "peft",
    "bitsandbytes",
    "flash_attn",
    "ray",
    "math_verify",
    "jsonschema",
    "liger_kernel",
    "torchao",
    "triton",
    "reasoning_gym",
    "transfer_queue",
    "optuna",
    "av",
    "verifiers",
    "mcp",
    "harbor",
    "gguf",
    "tinker",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
    "comet_ml",
}
LAZY = "lightrft.strategy.deepspeed"
"""Adapter that imports its package in functions only, so that its class is always there."""
OPTIONAL_ELSEWHERE = {
    "av": "data/media_files.py",
    "peft": "models/lora.py",
    "ray": "strategy/batching/transfer_queue.py",
    **dict.fromkeys(("mlflow", "trackio", "comet_ml"), "app/observe/trackers.py"),
}
"""Exceptions to `only inside the file or folder named after it`; there only inside a function."""
OWN = "lightrft.rewards.verifiers"
"""A folder of our own with the name of an optional package."""
LARGEST = 14
"""Files of a room, or of a folder inside of a room.

Its __init__.py and the folders in it are not counted.
"""
LARGEST_CORE = 20
"""Files of the core, which is read as a whole."""
HOMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}


# -- what is looked for, as functions of source text so that the tests below can prove that they
# find it


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@cache
def imports(source: str, path: str) -> list[tuple[str, bool]]:
    """Return (absolute module name, at import time) of every import in the file `path`.

    `path` is relative to the package's parent.
    """
    functions = [
        node for node in nodes(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    found = []

    for node in nodes(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = Path(path).parts[: -node.level] if node.level else ()
            base = ".".join([*folder, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, id(node) not in lazy) for name in names]

    return found


def shelf(module: str) -> str:
    """Return the shelf of a module: `lightrft.engine.base` -> `engine`.

    It is empty for the package itself and for other packages.
    """
    parts = module.split(".")
    return parts[1] if parts[0] == "lightrft" and len(parts) > 1 and parts[1] in SHELVES else ""


def wrong_ways(source: str, path: str) -> list[str]:
    """Return imports that go up."""
    here = shelf(path.removesuffix(".py").replace("/", "."))
    there = {shelf(name) for name, _ in imports(source, path)} - {"", here}
    return [
        f"{path} imports {other}"
        for other in sorted(there)
        if not here or SHELVES.index(other) > SHELVES.index(here)
    ]


def optional_imports(source: str, path: str) -> list[str]:
    """Return optional packages that are imported where they do not belong."""
    found = []
    for name, eager in imports(source, path):
        package = name.split(".")[0]
        if package in OPTIONAL and package not in places(path):
            if eager or path != f"lightrft/{OPTIONAL_ELSEWHERE.get(package)}":
                found.append(f"{path} imports {package}")
    return found


def adapter_imports(source: str, path: str) -> list[str]:
    """Return files and folders named after an optional package that others import eagerly.

    Eagerly means not inside a function.
    """
    return [
        f"{path} imports {name}"
        for name, eager in imports(source, path)
        if eager
        and name.startswith("lightrft.")
        and not name.startswith(LAZY)
        and OPTIONAL & set(name.removeprefix(OWN).split(".")) - places(path)
    ]


def places(path: str) -> set[str]:
    """Return the names of a file and its folders."""
    return set(Path(path).with_suffix("").parts)


def circle(folder: str, files: dict[str, str]) -> list[str]:
    """Return the files and folders right inside of `folder` that import each other in a circle.

    `folder` is a module, and lazy imports count too. `files` is path -> source, of the files in the
    folder and in its folders.
    """
    paths = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in files
    }
    needs: dict[str, set[str]] = {}
    for module, path in paths.items():
        named = [
            name if name in paths else name.rpartition(".")[0]
            for name, _ in imports(files[path], path)
        ]
        entries = {entry(folder, name) for name in named} - {entry(folder, module), ""}
        needs.setdefault(entry(folder, module), set()).update(entries)

    needs.pop("", None)  # __init__.py, which imports what others use from outside of the folder
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]

    return []


def entry(folder: str, module: str) -> str:
    """Return which entry of a folder a module belongs to.

    `lightrft.engine`, `lightrft.engine.vllm.shim` -> `vllm`; empty for modules that are not inside
    of the folder.
    """
    return (
        module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else ""
    )


def calls_of_print(source: str) -> list[int]:
    return [
        node.lineno
        for node in nodes(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def uses_of_torch_cuda(source: str, path: str) -> list[str]:
    attributes = [
        node for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr == "cuda"
    ]
    used = [
        f"{path}:{node.lineno}"
        for node in attributes
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]

    return used + [
        f"{path}: {name}" for name, _ in imports(source, path) if name.startswith("torch.cuda")
    ]


def public_classes(source: str) -> list[str]:
    """Return the names of a file's classes at the top level, without those that begin with an
    underscore.
    """
    return [
        node.name
        for node in nodes(source)[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def fields_read(source: str) -> set[str]:
    """Return names read from a configuration.

    They are read as `config.train.seed`, `train.seed`, `section.seed`, or by name as a string. A
    registered function is given the fields that its keyword-only parameters name.
    """
    owners = section_of_field()
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            holder = getattr(node.value, "attr", getattr(node.value, "id", None))
            section_itself = holder == "config" and node.attr in SECTIONS
            if holder in {owners.get(node.attr), "section", "config"} and not section_itself:
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.FunctionDef) and any(
            "register" in ast.unparse(one) for one in node.decorator_list
        ):
            found |= {argument.arg for argument in node.args.kwonlyargs}

    return found & set(owners)


# -- the package


def sources() -> Iterator[tuple[str, str]]:
    for file in FILES:
        yield file.read_text(), file.relative_to(ROOT.parent).as_posix()


def test_imports_go_down():
    assert [
        wrong
        for source, path in sources()
        if path != "lightrft/__init__.py"
        for wrong in wrong_ways(source, path)
    ] == []


def test_the_package_itself_imports_nothing_of_its_own_or_heavy():
    eager = {
        name
        for name, at_import in imports((ROOT / "__init__.py").read_text(), "lightrft/__init__.py")
        if at_import
    }
    assert eager == {"os", "typing.Any"}


def test_the_shelves_are_all_that_is_at_the_top():
    tops = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert tops | {"extras"} == set(SHELVES)
    assert sum(path.is_dir() for path in map(ROOT.joinpath, SHELVES)) <= MOST_FOLDERS


def test_every_folder_is_a_package():
    assert {file.parent for file in FILES} == {
        file.parent for file in FILES if file.name == "__init__.py"
    }


def test_no_folder_has_too_many_files():
    counts = Counter(
        file.parent.relative_to(ROOT).as_posix() for file in FILES if file.name != "__init__.py"
    )
    most = {".": counts["."], "core": LARGEST_CORE}
    assert {n: count for n, count in counts.items() if count > most.get(n, LARGEST)} == {}


def test_optional_packages_stay_in_the_place_named_after_them():
    assert [wrong for source, path in sources() for wrong in optional_imports(source, path)] == []


def test_adapters_of_optional_packages_are_imported_when_chosen():
    assert [wrong for source, path in sources() for wrong in adapter_imports(source, path)] == []


def test_a_lazy_adapter_is_imported_without_its_package():
    code = f"import sys; sys.modules['deepspeed'] = None; import {LAZY}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_folders_of_a_folder_have_no_circle():
    files = {path: source for source, path in sources()}
    circles = {}
    for folder in {
        file.parent.relative_to(ROOT.parent).as_posix() for file in FILES if file.parent != ROOT
    }:
        inside = {path: source for path, source in files.items() if path.startswith(f"{folder}/")}
        circles[folder] = circle(folder.replace("/", "."), inside)
    assert {folder: members for folder, members in circles.items() if members} == {}


def test_no_room_for_what_has_no_name():
    named = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.stem in HOMELESS]
    assert named == []


def test_no_two_public_classes_have_one_name():
    names = Counter(name for source, _ in sources() for name in public_classes(source))
    assert {name for name, count in names.items() if count > 1} == set()


def test_the_library_does_not_print():
    assert {path: lines for source, path in sources() if (lines := calls_of_print(source))} == {}


def test_one_place_decides_the_device():
    others = [
        (source, path) for source, path in sources() if path != "lightrft/models/parallel/device.py"
    ]
    assert [use for source, path in others for use in uses_of_torch_cuda(source, path)] == []


@pytest.mark.skipif(not installed(), reason="some fields are read by extras")
def test_every_config_field_is_read():
    # others in this folder only check and explain
    readers = ("lightrft/config/resolve.py", "lightrft/config/sections.py")
    read = set().union(
        *(
            fields_read(source)
            for source, path in sources()
            if path in readers or not path.startswith("lightrft/config/")
        )
    )
    # other rooms register the functions of the core, which know no registry
    read |= {
        argument.arg
        for source, path in sources()
        if path.startswith("lightrft/core/")
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.kwonlyargs
    }
    assert sorted(set(section_of_field()) - read) == []


# -- the tests can fail


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lightrft/engine/hf.py", "from lightrft.strategy import StrategyBase"),
        ("lightrft/engine/hf.py", "def f():\n    import lightrft.app.trainer.ppo"),
        ("lightrft/engine/hf.py", "from ..rewards import runner"),
        ("lightrft/engine/hf.py", "from lightrft import strategy"),
        ("lightrft/registry.py", "from lightrft.config import Config"),
    ],
)
def test_finds_wrong_imports(path, source):
    assert len(wrong_ways(source, path)) == 1


def test_lets_right_imports_pass():
    source = (
        "from lightrft.engine.base import Engine\nfrom .base import Engine\nfrom lightrft.models.parallel"
        " import mesh\nimport torch"
    )
    assert wrong_ways(source, "lightrft/engine/hf.py") == []


def test_finds_optional_packages():
    assert optional_imports("def f():\n    import vllm.config", "lightrft/engine/hf.py")
    assert optional_imports("import mlflow", "lightrft/app/observe/trackers.py")
    assert not optional_imports("def f():\n    import mlflow", "lightrft/app/observe/trackers.py")
    assert not optional_imports("from vllm import LLM", "lightrft/engine/vllm/shim.py")
    assert not optional_imports("from sglang.srt import utils", "lightrft/engine/sglang/shim.py")
    assert optional_imports("from vllm import LLM", "lightrft/engine/sglang/shim.py")
    assert adapter_imports(
        "from lightrft.engine.vllm import VLLMEngine", "lightrft/engine/build.py"
    )

    assert adapter_imports(
        "from lightrft.engine.sglang.shim import SGLangShim", "lightrft/engine/build.py"
    )
    assert not adapter_imports(
        "from lightrft.engine.sglang.shim import SGLangShim", "lightrft/engine/sglang/samples.py"
    )
    assert not adapter_imports(
        "def f():\n    from lightrft.engine.vllm import VLLMEngine", "lightrft/engine/build.py"
    )


def test_finds_circles():
    files = {
        "lightrft/data/a.py": "def f():\n    from lightrft.data.own.b import x",
        "lightrft/data/own/__init__.py": "",
        "lightrft/data/own/b.py": "from lightrft.data.c import x",
        "lightrft/data/c.py": "import lightrft.data.a",
    }
    assert set(circle("lightrft.data", files)) == {"a", "own", "c"}
    assert circle("lightrft.data", files | {"lightrft/data/c.py": "import lightrft.config"}) == []
    assert circle("lightrft.data.own", files) == []


def test_finds_prints_cuda_and_reads():
    assert calls_of_print("x = 1\nprint(x)") == [2]
    assert not calls_of_print("console.print(1)")
    assert public_classes("class A: ...\nclass _B: ...\ndef f():\n    class C: ...") == ["A"]
    assert uses_of_torch_cuda("import torch\ntorch.cuda.empty_cache()", "x.py")
    assert uses_of_torch_cuda("from torch.cuda import Stream", "x.py")
    source = "config.train.seed; optim.l2; values['fsdp']; other.bf16; config.reward.max_norm"
    assert fields_read(source) == {"seed", "l2", "fsdp"}
    assert fields_read("@losses.register('x')\ndef f(a, *, dual_clip, other): ...") == {"dual_clip"}
    assert fields_read("def f(a, *, dual_clip): ...") == set()


@pytest.mark.skipif(not installed(), reason="the pages name files of extras")
def test_the_pages_about_the_code_name_files_that_exist():
    pages = [ROOT.parent / "ARCHITECTURE.md", ROOT.parent / "docs" / "reading.md"]
    named = {
        name for page in pages for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    }
    assert len(named) > 20
    absent = {
        name for name in named if not (ROOT / name).is_file() and not (ROOT.parent / name).is_file()
    }
    assert absent == set()


def test_the_table_of_shelves_has_all_in_order():
    text = (ROOT.parent / "ARCHITECTURE.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, re.M)) == SHELVES[::-1]


LONGEST_CHAIN = 12
"""Modules from a command down to the last one it needs.

A smaller number is an achievement, a larger one a defect.
"""


def test_imports_have_no_circle_and_their_longest_chain_does_not_grow():
    modules = {
        path.relative_to(ROOT.parent)
        .with_suffix("")
        .as_posix()
        .replace("/", ".")
        .removesuffix(".__init__"): path
        for path in FILES
    }
    needs = {}

    for module, path in modules.items():
        named = [
            name
            for name, eager in imports(path.read_text(), path.relative_to(ROOT.parent).as_posix())
            if eager
        ]
        needs[module] = {
            name if name in modules else name.rpartition(".")[0] for name in named
        } & modules.keys() - {module}

    order = list(TopologicalSorter(needs).static_order())  # CycleError names a circle
    depth: dict[str, int] = {}
    for module in order:
        depth[module] = 1 + max((depth[other] for other in needs[module]), default=0)
    assert max(depth.values()) <= LONGEST_CHAIN


def names_of(source: str) -> set[str]:
    """Return what a module defines, also under conditions, and what it imports."""
    names: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
    if "__getattr__" in names:  # it imports what is asked for, from a table
        constants = (each.value for each in nodes(source) if isinstance(each, ast.Constant))
        names |= {value for value in constants if isinstance(value, str)}
    return names


def test_every_imported_name_exists():
    """Some files are imported only where an optional package or a GPU is."""
    names = {file: names_of(file.read_text()) for file in FILES}
    missing = []
    for place in (ROOT, ROOT.parent / "scripts"):
        for file in sorted(place.rglob("*.py")):
            for node in nodes(file.read_text()):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                if shelf(node.module) == "extras" and not installed():
                    continue
                if node.level or node.module.split(".")[0] != "lightrft":
                    continue
                base = ROOT.parent / node.module.replace(".", "/")
                module = base.with_suffix(".py")
                found = names.get(module if module in names else base / "__init__.py", set())
                missing += [
                    f"{file.name}:{node.lineno} {node.module} {each.name}"
                    for each in node.names
                    if each.name not in found
                    and not (base / each.name).is_dir()
                    and not (base / f"{each.name}.py").is_file()
                ]
    assert missing == []
