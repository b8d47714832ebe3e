"""Check on a GPU what could only be reasoned about without one.

Correctness is checked by tests, speed and memory by figures with an aim.

    bash scripts/gpu_check.sh               # all parts
    bash scripts/gpu_check.sh first --minutes 14   # what was never seen, the most decisive first
    bash scripts/gpu_check.sh kernels head  # some; each takes less than eight minutes
    bash scripts/gpu_check.sh --list        # parts, checks and their aims
    bash scripts/gpu_check.sh --device cpu  # tiny sizes, without the device's aims

Every check is a process of its own with a time limit, so one that crashes or runs out of memory
ends no other. A check whose needs are not met (a package, a number of devices, the time that is
left) is skipped, with the reason, and --resume goes on after those that OUT has results of. At the
end there are a table and, as the last line, the same as JSON, also in OUT/gpu_check.json beside the
whole output of each check. The exit code is 0 unless something failed.

WHEELS=folder: wheels of missing packages, unpacked for these processes alone, without a network
(pip, --no-deps).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightrft.versions import CORE, installed_version  # noqa: E402  after its folder

TEST_DISTRIBUTIONS = ("pytest", "hypothesis")
"""Distributions that the tests import beside CORE."""
DEPENDENCIES = (
    "absl-py",
    "dill",
    "grpcio",
    "iniconfig",
    "markdown",
    "multiprocess",
    "pandas",
    "pluggy",
    "protobuf",
    "pyarrow",
    "python-dateutil",
    "sortedcontainers",
    "tensorboard-data-server",
    "tzdata",
    "werkzeug",
    "xxhash",
)
"""Distributions that both need, beside what torch and transformers need.

Wheels are unpacked without their dependencies.
"""
MODULES = {
    "absl-py": "absl",
    "grpcio": "grpc",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
    "python-dateutil": "dateutil",
    "pyyaml": "yaml",
    "tensorboard-data-server": "tensorboard_data_server",
}
"""Distribution -> module, where the names differ."""
PACKAGES = {MODULES.get(name, name): name for name in (*CORE, *TEST_DISTRIBUTIONS, *DEPENDENCIES)}
"""Module -> distribution, for tests and runs.

DeepSpeed, liger-kernel and vLLM are only needed by their own checks.
"""


@dataclass(frozen=True)
class Aim:
    """One figure of a check, and the values that it should have."""

    figure: str
    least: float | None = None
    most: float | None = None
    anywhere: bool = False
    """True if the aim must be met on a CPU too, at tiny sizes."""

    @property
    def text(self) -> str:
        words = [
            f">= {self.least:g}" if self.least is not None else "",
            f"<= {self.most:g}" if self.most is not None else "",
        ]
        return " and ".join(filter(None, words)) or "no aim"

    def verdict(self, measured: float, device: str) -> bool | None:
        """Return whether a value meets the aim; None if there is nothing to meet."""
        if (self.least is None and self.most is None) or (device == "cpu" and not self.anywhere):
            return None
        return (self.least is None or measured >= self.least) and (
            self.most is None or measured <= self.most
        )


@dataclass(frozen=True)
class Check:
    name: str
    part: str
    command: tuple[str, ...]
    """Arguments of Python: a measurement's own, or pytest's.

    pytest runs the tests marked `gpu`, and on a CPU all others.
    """
    aims: tuple[Aim, ...]
    seconds: int = 120
    modules: tuple[str, ...] = ()
    """Modules that it needs beside PACKAGES."""
    devices: int = 1
    only_gpu: bool = False
    bare: bool = False
    """True if it needs none of PACKAGES: it computes with the modules of lightrft alone."""


@dataclass
class Row:
    """One line of the table.

    `ok` is None where there is nothing to meet, and for a skipped check.
    """

    part: str
    check: str
    figure: str
    expected: str
    measured: float | None
    ok: bool | None
    note: str = ""


def measured(name: str, *options: str) -> tuple[str, ...]:
    return "scripts/gpu_measure.py", name, *options


def tests(*arguments: str) -> tuple[str, ...]:
    return "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments


NONE_FAILS = (
    Aim("failed", most=0, anywhere=True),
    Aim("skipped", most=0),
    Aim("passed", least=1, anywhere=True),
)
NO_CASE_FAILS = (Aim("failed cases", most=0, anywhere=True),)
CLOSE = (Aim("relative distance", most=1e-5, anywhere=True),)
CLOSE_BF16 = (Aim("relative distance", most=1e-2, anywhere=True),)
VLLM = {"modules": ("vllm",)}
DEEPSPEED = {"modules": ("deepspeed", "einops", "hjson", "msgpack", "ninja", "cpuinfo")}

RUNS_OF_AN_ENGINE = (
    Aim("mismatch of log-probs", most=2e-3, anywhere=True),
    Aim("worse than the best token", most=0.1, anywhere=True),
    Aim("GB beside the weights asleep", most=4),
    *map(Aim, ("tokens/s", "s to start", "s asleep", "s awake", "s stream")),
)
BARE = {"part": "first", "bare": True}
SPEED_OF_TRAINING = (Aim("tokens/s"), Aim("share of peak", least=0.25), Aim("peak GB"))

CHECKS = [
    Check(
        "machine",
        command=measured("first_machine"),
        aims=(
            Aim("toolkit of another CUDA", most=0),
            Aim("processes on the GPU", most=1),
            Aim("capability"),
        ),
        seconds=40,
        **BARE,
    ),
    Check(
        "an engine that sleeps and is closed asleep",
        command=measured("first_engine"),
        aims=(Aim("tokens of a second engine", least=1, anywhere=True), *RUNS_OF_AN_ENGINE),
        seconds=260,
        **BARE | VLLM,
    ),
    Check(
        "an engine with experts",
        command=measured("first_experts"),
        aims=(Aim("experts that differ", most=0.02), *RUNS_OF_AN_ENGINE),
        seconds=200,
        **BARE | VLLM,
    ),
    Check(
        "four layers of 7B",
        command=measured("training", "full", "none", "Qwen/Qwen2.5-7B", "4"),
        aims=SPEED_OF_TRAINING,
        seconds=100,
        **BARE,
    ),
    Check(
        "a layer of divided experts",
        command=measured("first_divided_experts"),
        aims=(Aim("host waits", most=1, anywhere=True), Aim("ms")),
        seconds=70,
        **BARE,
    ),
    Check(
        "matrices in four bits",
        command=measured("first_four_bits"),
        aims=(
            Aim("codes unlike the host's", most=1e-4, anywhere=True),
            Aim("ms to make", most=50),
            Aim("ms to read", most=2),
        ),
        seconds=60,
        **BARE | {"modules": ("bitsandbytes",)},
    ),
    Check(
        "training in FP8",
        command=measured("first_fp8"),
        aims=(Aim("tokens/s"), Aim("of bfloat16")),
        seconds=110,
        only_gpu=True,
        **BARE | {"modules": ("torchao",)},
    ),
    Check(
        "drafts from the text after a sleep",
        command=measured("first_drafts"),
        aims=RUNS_OF_AN_ENGINE,
        seconds=200,
        **BARE | VLLM,
    ),
    Check(
        "attention",
        "kernels",
        tests("tests/models/attention/test_flash_attn.py", "-k", "every_shape or real_kernels"),
        NONE_FAILS,
        150,
    ),
    Check("host syncs", "kernels", tests("tests/invariants/test_host_sync.py"), NONE_FAILS, 120),
    Check(
        "log-probs against float64",
        "kernels",
        measured("head_error"),
        (
            Aim("float32 products", most=1e-3),
            Aim("rounded products"),
            Aim("gradients", most=1e-2, anywhere=True),
        ),
        90,
    ),
    Check(
        "log-probs",
        "head",
        measured("head"),
        (
            Aim("H 1,536: ms", most=75),
            Aim("H 1,536: peak GB", most=5),
            Aim("H 3,584: ms", most=120),
            Aim("H 3,584: peak GB", most=5),
        ),
        300,
    ),
    Check(
        "1.5B, full recomputation",
        "training",
        measured("training", "full", "none"),
        (Aim("tokens/s"), Aim("share of peak", least=0.25), Aim("peak GB")),
        150,
    ),
    Check(
        "1.5B, none",
        "training",
        measured("training", "no", "none"),
        (Aim("tokens/s"), Aim("share of peak", least=0.25), Aim("peak GB")),
        150,
    ),
    Check(
        "1.5B, selective recomputation",
        "training",
        measured("training", "selective", "none"),
        (Aim("tokens/s"), Aim("share of peak", least=0.25), Aim("peak GB")),
        150,
    ),
    Check(
        "1.5B, fused kernels",
        "training_options",
        measured("training", "full", "liger"),
        (Aim("tokens/s"), Aim("share of peak", least=0.25), Aim("peak GB")),
        130,
        modules=("liger_kernel",),
        only_gpu=True,
    ),
    Check(
        "1.5B, inputs of blocks on the host",
        "training_options",
        measured("inputs_on_host"),
        (*SPEED_OF_TRAINING, Aim("reserved GB"), Aim("reserved GB less than full", least=0.9)),
        170,
    ),
    Check(
        "1.5B, deterministic",
        "training_options",
        measured("deterministic"),
        (Aim("tokens/s"), Aim("of the speed without", least=0.5)),
        180,
    ),
    Check(
        "experts, four layers of 30B-A3B",
        "experts",
        measured("training", "full", "none", "Qwen/Qwen3-30B-A3B", "4"),
        (Aim("tokens/s"), Aim("share of peak"), Aim("peak GB")),
        150,
    ),
    Check(
        "experts, selective recomputation",
        "experts",
        measured("training", "selective", "none", "Qwen/Qwen3-30B-A3B", "4"),
        (Aim("tokens/s"), Aim("share of peak"), Aim("peak GB")),
        150,
    ),
    Check(
        "rounding of a bfloat16 head",
        "head",
        measured("head_rounding"),
        (Aim("bfloat16 logits", least=1e-3), Aim("float32 logits", most=1e-4)),
        60,
    ),
    Check(
        "gradients of 7B on rank 0 of 8",
        "memory",
        measured("gradient_memory", "7B"),
        (Aim("every micro-batch", most=4.2), Aim("once", least=29, most=32)),
        150,
    ),
    Check(
        "gradients of 14B on rank 0 of 8",
        "memory",
        measured("gradient_memory", "14B"),
        (Aim("every micro-batch", most=8.2), Aim("once", least=57, most=61)),
        200,
        only_gpu=True,
    ),
    Check(
        "a gathered block of experts, 30B-A3B",
        "memory",
        measured("gathered_experts"),
        tuple(Aim(f"{ranks} ranks", most=1.05) for ranks in (32, 256, 1024)),
        80,
    ),
    Check(
        "host of a micro-batch, 28 narrow layers: ms",
        "memory",
        measured("tensor_parallel_host"),
        (Aim("whole"), Aim("one of two ranks")),
        40,
    ),
    Check(
        "buckets ahead: bits",
        "streams",
        tests(
            "tests/models/parallel/test_device.py", "tests/models/parallel/test_inputs_on_host.py"
        ),
        NONE_FAILS,
        120,
    ),
    Check(
        "buckets ahead: overlap",
        "streams",
        measured("ahead_overlap"),
        (Aim("share of a copy", least=0.8),),
        60,
    ),
    Check(
        "offload: bits",
        "streams",
        tests("tests/strategy/test_offload.py", "-k", "same_bits or bit_by_bit"),
        NONE_FAILS,
        120,
    ),
    Check(
        "offload: GB/s",
        "streams",
        measured("offload_speed"),
        (Aim("to the host", least=30), Aim("back", least=30)),
        100,
    ),
    Check(
        "staging of a checkpoint: GB/s",
        "streams",
        measured("staging_speed"),
        (Aim("as checkpoints do"), Aim("pinned"), Aim("pinned, first time")),
        60,
    ),
    Check(
        "a run learns, bfloat16",
        "runs",
        measured("learning", "hf"),
        (
            Aim("rise of the reward", least=0.05),
            Aim("mismatch of log-probs", most=2e-2, anywhere=True),
        ),
        200,
    ),
    Check(
        "killed and resumed",
        "runs",
        measured("resume"),
        (
            Aim("relative distance of metrics", most=1e-3, anywhere=True),
            Aim("steps", least=6, anywhere=True),
        ),
        240,
    ),
    Check(
        "merging",
        "adapters",
        measured("merging"),
        (
            Aim("places unlike torch's", most=1e-3, anywhere=True),
            Aim("largest distance", most=2**-7, anywhere=True),
            Aim("ms to merge", most=0.3),
            Aim("time of peft's layer", most=1.2),
        ),
        90,
        modules=("peft",),
    ),
    Check(
        "adapters learn, bfloat16",
        "adapters",
        measured(
            "learning",
            "hf",
            "--lora_rank=8",
            "--lora_alpha=32",
            "--actor_learning_rate=1e-2",
            "--init_kl_coef=0.001",
        ),
        (
            Aim("rise of the reward", least=0.05),
            Aim("mismatch of log-probs", most=2e-2, anywhere=True),
        ),
        200,
        modules=("peft",),
    ),
    Check("FSDP2 against torch", "deepspeed", measured("contract", "fsdp"), NO_CASE_FAILS, 90),
    *(
        Check(
            f"DeepSpeed {stage} against torch",
            "deepspeed",
            measured("contract", str(stage)),
            NO_CASE_FAILS,
            90,
            **DEEPSPEED,
        )
        for stage in range(4)
    ),
    Check(
        "vLLM passes the contract", "vllm", measured("engine_contract"), NO_CASE_FAILS, 300, **VLLM
    ),
    Check(
        "sleep and wake",
        "vllm_runs",
        measured("sleep_cycles"),
        (
            Aim("GB that stay", most=4),
            Aim("GB of growth", most=0.1),
            Aim("answers that change", most=0, anywhere=True),
        ),
        230,
        **VLLM,
    ),
    Check(
        "a run learns with vLLM, bfloat16",
        "vllm_runs",
        measured("learning", "vllm"),
        (
            Aim("rise of the reward", least=0.05),
            Aim("mismatch of log-probs", most=2e-2, anywhere=True),
        ),
        240,
        **VLLM,
    ),
    Check(
        "weights of 7B",
        "vllm_speed",
        measured("sync", "Qwen/Qwen2.5-7B"),
        (Aim("first: s"), Aim("s", most=0.6)),
        200,
        **VLLM,
    ),
    Check(
        "weights of experts, twelve layers of 30B-A3B",
        "vllm_experts",
        measured("sync", "Qwen/Qwen3-30B-A3B", "12"),
        (Aim("tensors"), Aim("GB"), Aim("first: s"), Aim("s", most=0.8)),
        300,
        **VLLM,
    ),
    Check(
        "rollout of 1.5B",
        "vllm_speed",
        measured("rollout_speed"),
        (Aim("tokens/s"), Aim("of LLM.generate", least=0.95), Aim("beside a busy thread")),
        270,
        **VLLM,
    ),
    Check("FSDP", "layouts", measured("layout"), CLOSE, 100, devices=2),
    Check("replicas", "layouts", measured("layout", "--dp_replicate=0"), CLOSE, 80, devices=2),
    Check("HSDP", "layouts", measured("layout", "--dp_replicate=2"), CLOSE, 100, devices=2),
    Check("tensor parallel", "layouts", measured("layout", "--tp_size=2"), CLOSE, 100, devices=2),
    Check("sequence parallel", "layouts", measured("layout", "--sp_size=2"), CLOSE, 100, devices=2),
    Check(
        "divided experts",
        "divided_experts",
        measured("layout", "--ep_size=2"),
        CLOSE,
        100,
        devices=2,
    ),
    Check(
        "FSDP, bfloat16", "layouts_bf16", measured("layout", "--bf16"), CLOSE_BF16, 100, devices=2
    ),
    Check(
        "HSDP, bfloat16",
        "layouts_bf16",
        measured("layout", "--bf16", "--dp_replicate=2"),
        CLOSE_BF16,
        100,
        devices=2,
    ),
    Check(
        "tensor parallel, bfloat16",
        "layouts_bf16",
        measured("layout", "--bf16", "--tp_size=2"),
        CLOSE_BF16,
        100,
        devices=2,
    ),
    Check(
        "sequence parallel, bfloat16",
        "layouts_bf16",
        measured("layout", "--bf16", "--sp_size=2"),
        CLOSE_BF16,
        100,
        devices=2,
    ),
    Check(
        "death of a rank",
        "ranks",
        measured("death_of_a_rank"),
        (Aim("seconds", most=60, anywhere=True), Aim("named", least=1, anywhere=True)),
        180,
        devices=2,
    ),
    Check(
        "an engine of two ranks",
        "ranks",
        measured("shared_engine"),
        (Aim("steps", least=6, anywhere=True),),
        290,
        devices=2,
        **VLLM,
    ),
]
PARTS = list(dict.fromkeys(check.part for check in CHECKS))


def why_skipped(check: Check, device: str, available: int) -> str:
    """Return the reason why a check cannot run here; an empty string if it can."""
    needed = check.modules if check.bare else (*check.modules, *PACKAGES)
    missing = [module for module in needed if not is_installed(module)]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if check.only_gpu and device == "cpu":
        return "needs a GPU"
    if device != "cpu" and available < check.devices:
        return f"needs {check.devices} GPUs, this machine has {available}"
    return ""


def missing_packages() -> list[str]:
    """Return the distributions without which neither tests nor runs are possible."""
    return [name for module, name in PACKAGES.items() if not is_installed(module)]


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def run_check(check: Check, device: str, ranks: int, out: Path) -> list[Row]:
    """Run one check in a process group of its own, within its time.

    Its whole output goes to a file in `out`.
    """
    is_measurement = check.command[0] == "scripts/gpu_measure.py"
    marked = "not gpu" if device == "cpu" else "gpu"
    where = [f"--device={device}", f"--ranks={ranks}"] if is_measurement else ["-m", marked]
    arguments = [*check.command[:2], *where, *check.command[2:]]
    log = out / f"{re.sub('[^a-z0-9]+', '_', check.name.lower())}.log"
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = (
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GPU_CHECK_OUT": str(out),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    )
    note = ""

    with open(log, "w") as errors, open(log.with_suffix(".out"), "w") as printed:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=printed,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(check.seconds)
            note = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            note = f"not done after {check.seconds} s"
        finally:
            end_group(process)

    output = log.with_suffix(".out").read_text()
    figures = figures_of_line(output) if is_measurement else figures_of_pytest(output)
    if is_measurement and note:
        figures = {}
    if not figures:
        note = f"{note or 'printed no figures'}: {last_line(log.read_text() or output)}"

    return rows_of(check, figures, device, note)


def end_group(process: subprocess.Popen) -> None:
    """End what is left of the processes that a check started.

    torchrun has five seconds to end its own.
    """
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def figures_of_line(output: str) -> dict[str, float]:
    """Read the figures in the last line of a measurement."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def figures_of_pytest(output: str) -> dict[str, float]:
    """Read the numbers in the last line of pytest's summary; an error counts as a failure."""
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    matches = re.findall(r"(\d+) (passed|failed|skipped|errors?)", last_line(output))
    for number, word in matches:
        counts["failed" if word.startswith("error") else word] += int(number)
    return counts if matches else {}


def last_line(text: str) -> str:
    return next(
        (line.strip()[-200:] for line in reversed(text.splitlines()) if line.strip()), "no output"
    )


def rows_of(check: Check, figures: dict[str, float], device: str, note: str) -> list[Row]:
    """Return one row for each aim.

    A figure with an aim that is missing fails its check; one without is left out.
    """
    rows = []
    for aim in check.aims:
        value = figures.get(aim.figure)
        if value is not None:
            rows.append(
                Row(
                    check.part,
                    check.name,
                    aim.figure,
                    aim.text,
                    value,
                    aim.verdict(value, device),
                    note,
                )
            )
        elif not figures:
            rows.append(Row(check.part, check.name, aim.figure, aim.text, None, False, note))
        elif aim.text != "no aim":
            rows.append(
                Row(
                    check.part,
                    check.name,
                    aim.figure,
                    aim.text,
                    None,
                    None,
                    "not known for this device",
                )
            )

    return rows


def skipped(check: Check, reason: str) -> Row:
    return Row(check.part, check.name, "", "", None, None, f"skipped: {reason}")


def table(rows: Sequence[Row]) -> str:
    """Return the rows under each other, in columns."""
    words = {True: "yes", False: "NO", None: "-"}
    head = ("part", "check", "figure", "expected", "measured", "ok", "")
    lines = [head] + [
        (
            row.part,
            row.check,
            row.figure,
            row.expected,
            number(row.measured),
            words[row.ok],
            row.note,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def versions(device: str) -> dict[str, Any]:
    """Return the versions and devices of the figures, and the signature of torch's attention.

    The signature changes between versions.
    """
    from inspect import signature

    import torch

    installed: dict[str, Any] = {
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "device": device,
    }
    for name in ("torch", "transformers", "triton", "vllm", "deepspeed", "liger-kernel"):
        installed[name] = installed_version(name)
    if device != "cpu":
        installed["devices"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    try:
        from torch.nn.attention.varlen import varlen_attn

        installed["varlen_attn"] = str(signature(varlen_attn))
    except ImportError:
        installed["varlen_attn"] = None
    return installed


def available_devices(device: str) -> int:
    import torch

    return 0 if device == "cpu" else torch.cuda.device_count()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; without one, all"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="CHECK",
        help="names of checks, instead of whole parts",
    )

    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_check"), help="folder of the results"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="skip checks that may not end within this time",
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip checks that --out has results of"
    )
    parser.add_argument(
        "--list", action="store_true", help="print parts, checks and aims, and run nothing"
    )
    args = parser.parse_args(argv)

    unknown = [*({*args.parts} - {*PARTS}), *({*args.only} - {check.name for check in CHECKS})]
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; the parts are {', '.join(PARTS)}, and --list has the"
            " checks"
        )

    chosen = [
        check
        for check in CHECKS
        if check.part in (args.parts or PARTS) and (not args.only or check.name in args.only)
    ]
    if args.list:
        rows = [
            Row(check.part, check.name, aim.figure, aim.text, None, None)
            for check in chosen
            for aim in check.aims
        ]
        print(table(rows))
        return 0

    missing = missing_packages()
    if missing and not all(check.bare for check in chosen):
        print(
            f"These packages are missing: {' '.join(missing)}. With a network: pip install --no-deps"
            " -r requirements/gpu.txt. Without one, on a machine that has it: pip download --no-deps"
            f" -c requirements/gpu.txt -d wheels {' '.join(missing)}; then here: WHEELS=wheels bash"
            " scripts/gpu_check.sh",
            file=sys.stderr,
        )
        if not any(check.bare for check in chosen):
            return 2

    available = available_devices(args.device)
    if args.device == "cuda" and not available:
        print(
            "There is no CUDA device here; --device cpu runs what has a meaning on a CPU.",
            file=sys.stderr,
        )
        return 2

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes of a check, too
    done = rows_before(args.out) if args.resume else []
    return run_checks(chosen, args.device, available, args.out.resolve(), 60 * args.minutes, done)


def rows_before(out: Path) -> list[Row]:
    """Return the results of earlier checks in `out`; one that broke off has none, and runs again."""
    file = out / "gpu_check.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [Row(**row) for row in rows if row["measured"] is not None]


def run_checks(
    chosen: Sequence[Check],
    device: str,
    available: int,
    out: Path,
    seconds: float = float("inf"),
    done: Sequence[Row] = (),
) -> int:
    """Run one check after the other, of those that have no row in `done`, within `seconds`.

    The JSON in `out` has everything that is done so far, whatever ends this process.
    """
    out.mkdir(parents=True, exist_ok=True)
    ranks = 2 if device == "cpu" else min(8, available - available % 2)
    result: dict[str, Any] = {"versions": versions(device), "rows": []}
    print(json.dumps(result["versions"]), flush=True)

    rows = list(done)
    ends = time.monotonic() + seconds
    for check in chosen:
        if check.name in {row.check for row in done}:
            continue
        reason = why_skipped(check, device, available)
        began = time.monotonic()
        if not reason and began + check.seconds > ends:
            reason = f"may take {check.seconds} s, and {max(0, ends - began):.0f} s are left"
        some = (
            [skipped(check, reason)]
            if reason
            else run_check(check, device, ranks if check.devices > 1 else 1, out)
        )
        rows += some
        print(f"{time.monotonic() - began:6.1f} s  {check.part}: {check.name}", flush=True)
        failed = sum(row.ok is False for row in rows)
        result |= {"rows": [asdict(row) for row in rows], "failed": failed, "ok": not failed}
        (out / "gpu_check.json").write_text(json.dumps(result, indent=1))

    print(f"\n{table(rows)}\n")
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
