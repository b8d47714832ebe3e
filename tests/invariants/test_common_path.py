"""A step of plain GRPO is followed from function to function: it enters no option, and nobody has to
read more than so much to understand it.
"""

import ast
import runpy
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lightrft
from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.build import ppo_trainer
from lightrft.app.trainer.ppo import PPOTrainer
from lightrft.config import parse
from lightrft.core.step import StepRecord
from lightrft.strategy import get_strategy
from ranks import run_ranks
from runs import prepare
from with_vllm import load_vllm

pytestmark = pytest.mark.slow

ROOT = Path(lightrft.__file__).parent.as_posix() + "/"
FLAGS = [
    "--rollout_batch_size=8",
    "--n_samples_per_prompt=4",
    "--train_batch_size=32",
    "--generate_max_len=6",
    "--max_tokens_per_microbatch=128",
    "--advantage_estimator=grpo",
    "--init_kl_coef=0",
    "--reward=exact_match",
    "--max_steps=2",
]
MOST = {"hf": (43, 314, 14), "vllm": (45, 330, 14)}
"""Engine -> files, functions, and depth in own frames of the second step. A smaller number is an
achievement, a larger one a defect."""
OPTIONS = (
    "algorithms/roles/critic",
    "algorithms/roles/draft",
    "algorithms/roles/teacher",
    "algorithms/rollout/media_expansion",
    "algorithms/schedulers/",
    "algorithms/stages/filters",
    "algorithms/stages/penalty",
    "algorithms/stages/tokens",
    "app/run/recorded_samples",
    "engine/remote/",
    "engine/vllm/speculation",
    "engine/vllm/text_drafter",
    "extras/",
    "models/parallel/tensor_parallel",
    "models/peft",
    "strategy/shared_session",
)
"""Files and packages that plain GRPO on one rank does not enter."""
CORE = Path(ROOT) / "core"
LEAST_OF_CORE = 0.7
"""Share of the statements in the core's functions that its example and a plain run execute."""


class Followed:
    """The functions of lightrft that run, and how deep they are below the step."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_own(frame):
            return
        file = frame.f_code.co_filename.removeprefix(ROOT)
        self.functions.add((file, frame.f_code.co_qualname))
        self.depth = max(self.depth, self._depth(frame))

    def _depth(self, frame: FrameType | None) -> int:
        depth = 0
        while frame is not None and frame.f_code.co_qualname != "Step.__call__":
            depth += self._is_own(frame)
            frame = frame.f_back
        return depth + 1

    @staticmethod
    def _is_own(frame: FrameType) -> bool:
        """Return True for a named function of the package; a lambda belongs to the one around."""
        code = frame.f_code
        return code.co_filename.startswith(ROOT) and not code.co_name.startswith("<")


def plain_trainer(engine: str, folder: str) -> PPOTrainer:
    flags = [*prepare(Path(folder)), *FLAGS, f"--save_path={folder}/run", f"--engine_type={engine}"]
    if engine == "vllm":
        flags.append("--engine_kv_cache_gb=0.05")
    config = prepare_config("train_ppo", parse(flags, "train_ppo"))
    torch.manual_seed(0)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    return ppo_trainer(config, strategy)


def second_step(engine: str, folder: str) -> tuple[set[tuple[str, str]], int]:
    trainer = plain_trainer(engine, folder)
    followed = Followed()
    step = trainer.step

    def follow(number: int) -> StepRecord:
        if number == 1:
            return step(number)
        threading.setprofile(followed)
        sys.setprofile(followed)
        try:
            return step(number)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    trainer.step = follow
    trainer.fit()
    trainer.strategy.close()
    return followed.functions, followed.depth


def lines_of_core(folder: str) -> dict[str, set[int]]:
    """Return the lines of the core that its example and a plain run execute, by file."""
    lines: dict[str, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.parent != CORE:
            return None
        lines[path.name].add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        runpy.run_path(str(CORE.parent.parent / "examples" / "grpo_core.py"))["main"](num_steps=2)
        trainer = plain_trainer("hf", folder)
        trainer.fit()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    trainer.strategy.close()
    return lines


def statements(node: ast.AST, *, inside: bool = False) -> Iterator[int]:
    """Yield the first lines of statements in functions, without docstrings and protocols."""
    if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(n) for n in node.bases):
        return
    inside = inside or isinstance(node, ast.FunctionDef)
    for child in ast.iter_child_nodes(node):
        documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if inside and isinstance(child, ast.stmt) and not documents:
            if not isinstance(child, ast.FunctionDef):
                yield child.lineno
        yield from statements(child, inside=inside)


@pytest.mark.parametrize("engine", MOST)
def test_a_plain_step_enters_no_option_and_stays_small(engine, tmp_path):
    if engine == "vllm":
        load_vllm()
    ((functions, depth),) = run_ranks(1, second_step, engine, str(tmp_path), timeout=600)
    files = {file for file, _ in functions}

    assert all(list(Path(ROOT).glob(f"{option}*")) for option in OPTIONS)
    assert {file for file in files if file.startswith(OPTIONS)} == set()
    assert {"core/step.py", "core/rollout.py"} <= files
    counted = (len(files), len(functions), depth)
    assert all(count <= most for count, most in zip(counted, MOST[engine], strict=True)), counted


def test_most_of_the_core_is_executed_by_its_example_and_a_plain_run(tmp_path):
    (executed,) = run_ranks(1, lines_of_core, str(tmp_path), timeout=300)
    total = run = 0
    for path in CORE.glob("*.py"):
        lines = set(statements(ast.parse(path.read_text())))
        total += len(lines)
        run += len(lines & executed[path.name])
    assert run >= LEAST_OF_CORE * total, f"{run} of {total}"
