"""Compare the part of SGLang that lightrft/engine/sglang/ uses with a version of SGLang.

Sources are read, not imported.

    python scripts/sglang_interface.py --out tests/engine/sglang_newest.json  # record the newest version
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARGUMENTS = ("arguments", "_on_accelerator", "_on_cpu")
SAMPLING = ("_parameters",)
TAGS = ("_sleep", "_wake")
"""Functions of the adapter whose strings are names of SGLang's.

They name arguments of the engine, of a request, and of its memory.
"""
ATTRIBUTES = {
    "sglang.srt.entrypoints.engine:Engine": [
        "_launch_detokenizer_subprocesses",
        "run_scheduler_process_func",
    ],
    "sglang.srt.layers.linear:ColumnParallelLinear": ["output_partition_sizes"],
    "sglang.srt.layers.linear:QKVParallelLinear": ["num_kv_head_replicas"],
    "sglang.srt.layers.linear:RowParallelLinear": ["input_size_per_partition"],
    "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE": [
        "intermediate_size_per_partition",
        "moe_ep_size",
        "moe_runner_config",
        "moe_tp_rank",
        "num_fused_shared_experts",
        "quant_method",
    ],
    "sglang.srt.layers.moe.moe_runner.base:MoeRunnerConfig": ["is_gated"],
    "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod": ["forward_cpu"],
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": ["next_token_logits"],
    "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding": ["shard_indices"],
    "sglang.srt.managers.io_struct:FlushCacheReqOutput": ["success"],
    "sglang.srt.managers.schedule_batch:Req": [
        "cache_salt",
        "inflight_middle_chunks",
        "output_ids",
        "rid",
    ],
    "sglang.srt.managers.scheduler:Scheduler": [
        "_engine_paused",
        "chunked_req",
        "collect_inflight_reqs",
        "enable_overlap",
        "handle_rpc_request",
        "result_queue",
        "tp_group",
        "tp_worker",
        "tree_cache",
        "waiting_queue",
    ],
    "sglang.srt.managers.tokenizer_manager:TokenizerManager": [
        "_subprocess_watchdog",
        "abort_request",
        "continue_generation",
        "is_pause",
        "pause_generation",
        "signal_handler_class",
    ],
    "sglang.srt.managers.tokenizer_manager:SignalHandler": [
        "running_phase_sigquit_handler",
        "sigterm_handler",
    ],
    "sglang.srt.managers.tp_worker:TpModelWorker": ["model_runner"],
    "sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache": ["__len__", "clear"],
    "sglang.srt.mem_cache.radix_cache:RadixCache": ["evictable_size"],
    "sglang.srt.model_executor.model_runner:ModelRunner": ["model"],
    "sglang.srt.sampling.custom_logit_processor:CustomLogitProcessor": ["to_str"],
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo": [
        "from_schedule_batch",
        "sampling_seed",
    ],
    "sglang.srt.utils.watchdog:SubprocessWatchdog": ["stop"],
    "sglang.srt.weight_sync.tensor_bucket:FlattenedTensorBucket": [
        "get_flattened_tensor",
        "get_metadata",
    ],
}
"""What the adapter uses of SGLang's objects beyond the methods of the engine.

It does so here and in SGLang's processes.
"""


ADAPTER = Path(__file__).resolve().parent.parent / "lightrft" / "engine" / "sglang"


def source() -> str:
    """Return the source of the adapter, from all its files."""
    return "\n".join(file.read_text() for file in sorted(ADAPTER.glob("*.py")))


def used(adapter: str) -> dict[str, Any]:
    """Return what the adapter's source uses.

    That is what it imports, what it calls with which keywords, and what strings name.
    """
    tree = ast.parse(adapter)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    imports = [
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang")
        for name in node.names
    ]
    modules = {
        name: f"{module}.{name}" for module, name in imports if name.islower() and "_" not in name
    }
    imports += [
        (modules[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    start = next(node for node in calls if ast.unparse(node.func) == "_SGLang")

    methods: dict[str, set[str]] = {}
    for call in calls:
        if ast.unparse(call.func).startswith("self.engine.") and isinstance(
            call.func.value, ast.Attribute
        ):
            owner = ast.unparse(call.func.value)
            name = call.func.attr
            if owner == "self.engine":
                methods.setdefault(name, set()).update(keyword.arg for keyword in call.keywords)

    return {
        "imports": imports,
        "methods": methods,
        "arguments": {word.arg for word in start.keywords if word.arg}
        | set(_keys(functions, ARGUMENTS)),
        # of the adapter's own processor
        "sampling": set(_keys(functions, SAMPLING)) - {"top_k", "top_p", "banned", "size"},
        "tags": {value for name in TAGS for value in _strings_in_sets(functions[name])},
    }


def interface(packages: Path | str) -> dict[str, Any]:
    """Return the interface of the SGLang in a folder of packages, for JSON.

    It covers what the adapter could use.
    """
    sources = Path(packages) / "sglang" / "srt"
    fields = [sources / "server_args.py", *sorted((sources / "arg_groups" / "fields").glob("*.py"))]
    constants = ast.parse((sources / "constants.py").read_text())

    return {
        "version": next(Path(packages).glob("sglang-*.dist-info"))
        .name.split("-")[1]
        .removesuffix(".dist"),
        "names": {
            module: sorted(names & _names(packages, module))
            for module, names in _imported().items()
        },
        "methods": _methods(_class(_module(packages, "sglang.srt.entrypoints.engine"), "Engine")),
        "arguments": sorted(
            {name for file in fields for name in _annotated(ast.parse(file.read_text()))}
        ),
        "sampling": sorted(
            _annotated(
                _class(_module(packages, "sglang.srt.sampling.sampling_params"), "SamplingParams")
            )
        ),
        "tags": sorted(
            node.value
            for node in ast.walk(constants)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
        "attributes": {
            place: sorted(set(names) & _attributes(packages, place))
            for place, names in ATTRIBUTES.items()
        },
    }


def missing(expected: dict[str, Any], installed: dict[str, Any]) -> list[str]:
    """Return the names that the adapter uses and the version does not have."""
    problems = [
        f"from {module} import {name}"
        for module, name in expected["imports"]
        if name not in installed["names"].get(module, [])
    ]
    for method, keywords in expected["methods"].items():
        lost = (
            [method]
            if method not in installed["methods"]
            else sorted(keywords - set(installed["methods"][method]))
        )
        takes_all = "**" in installed["methods"].get(method, [])
        problems += [] if lost and takes_all else [f"Engine.{method}: {name}" for name in lost]

    for kind in ("arguments", "sampling", "tags"):
        problems += [f"{kind}: {name}" for name in sorted(expected[kind] - set(installed[kind]))]
    return problems + [
        f"{place}.{name}"
        for place, names in ATTRIBUTES.items()
        for name in names
        if name not in installed["attributes"].get(place, [])
    ]


def _imported() -> dict[str, set[str]]:
    """Return module -> what the adapter imports from it."""
    imported: dict[str, set[str]] = {}
    for module, name in used(source())["imports"]:
        imported.setdefault(module, set()).add(name)
    return imported


def _module(packages: Path | str, module: str) -> ast.Module:
    path = Path(packages, *module.split("."))
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def _class(tree: ast.AST, name: str) -> ast.ClassDef:
    return next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )


def _names(packages: Path | str, module: str) -> set[str]:
    """Return the names that can be imported from a module.

    The module defines or imports them, or they are modules of a package.
    """
    folder = Path(packages, *module.split("."))
    names = {path.stem for path in folder.glob("*")}
    if folder.is_dir() and not (folder / "__init__.py").exists():
        return names

    for node in ast.walk(_module(packages, module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif (
            isinstance(node, ast.ImportFrom)
            and node.names[0].name == "*"
            and str(node.module).startswith(module)
        ):
            names |= _names(packages, node.module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {name.asname or name.name for name in node.names}

    return names


def _methods(cls: ast.ClassDef) -> dict[str, list[str]]:
    """Return method -> its parameters; `**` for any."""
    methods = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            spec = node.args
            methods[node.name] = [one.arg for one in [*spec.args, *spec.kwonlyargs]] + (
                ["**"] if spec.kwarg else []
            )
    return methods


def _annotated(tree: ast.AST) -> Iterator[str]:
    """Return the annotated fields of the classes in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _attributes(packages: Path | str, place: str) -> set[str]:
    """Return methods and fields of a class, and what the methods assign to `self`."""
    module, _, name = place.partition(":")
    cls = _class(_module(packages, module), name)
    assigned = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }

    return (
        assigned
        | set(_annotated(cls))
        | {
            node.name
            for node in ast.walk(cls)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
    )


def _keys(functions: dict[str, ast.FunctionDef], names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Dict):
                yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


def _strings_in_sets(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Set):
            yield from (element.value for element in node.elts if isinstance(element, ast.Constant))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                folder,
                "sglang",
            ],
            check=True,
        )
        zipfile.ZipFile(next(Path(folder).glob("*.whl"))).extractall(folder)
        used_interface = interface(folder)

    out.write_text(json.dumps(used_interface) + "\n")
    print(f"{out}: sglang {used_interface['version']}")


if __name__ == "__main__":
    main()
