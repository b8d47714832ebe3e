"""Time of whole GRPO steps, phase by phase, with the trainer as it is.

    python scripts/bench/step.py --preset vocab32k --engine vllm --ranks 2 --prompts 4 --steps 6

A random Qwen3, one character per token, 8 prompts x 8 samples a step, 64 new tokens at most, one
optimizer step on them in micro-batches of 16 sequences (over all ranks), float32, no divergence.
One JSON line per step, a summary in the last line:

    gen       the engine samples               sync   the weight stream into the engine
    old_logp  log-probs before the update      prep   the rest: decoding, rewards, advantages, planning
    fwdbwd    forward and backward             opt    gradient norm, clipping, AdamW

Each in wall seconds, and in CPU seconds of the process with the suffix `_cpu`: on a shared machine
compare those. `prep_cpu` has the CPU seconds of worker processes too, such as those of rewards.
With several ranks the lines are rank 0's; `--out FILE` keeps those of all ranks, in FILE.rank0,
FILE.rank1, ...
"""

import argparse
import json
import os
import random
import resource
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import on_ranks, parser_of

PRESETS = {"small": 112, "vocab32k": 32000}
"""Vocabulary of a model with 4 layers of width 128: 0.8 and 9 million parameters."""
PHASES = ("total", "gen", "sync", "old_logp", "prep", "fwdbwd", "opt")
WORDINGS = ("{}+{}=", "how much is {}+{}? ", "the sum of {} and {} is ", "{} plus {}: ")


def digits(samples: list, answer: list[str], **_: Any) -> list[float]:
    """Return 1 for the answer, else a tenth of the share of digits.

    So a random model has groups with different rewards.
    """
    return [
        1.0
        if sample.text == right
        else 0.1 * sum(letter in string.digits for letter in sample.text) / max(len(sample.text), 1)
        for sample, right in zip(samples, answer, strict=True)
    ]


def make_model(folder: Path, vocabulary: int) -> None:
    """Write a random model and its tokenizer as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<bos>", "<eos>", *string.printable[:95]]
    words += [f"<{index}>" for index in range(vocabulary - len(words))]
    backend = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[])
    )
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_prompts(file: Path, count: int = 512) -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        a = rng.randrange(1000)
        b = rng.randrange(1000)
        rows.append({"prompt": rng.choice(WORDINGS).format(a, b), "answer": str(a + b)})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Clock:
    """Wall and CPU seconds of what is charged, without what is charged inside of it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._spent: dict[str, complex] = {}
        self._inner = [0j]
        self._of_workers = _worker_seconds()

    def charge(self, owner: Any, method: str, phase: str) -> None:
        original = getattr(owner, method)

        def charged(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                result = original(*args, **kwargs)
            return self._charged(result, phase) if isinstance(result, Iterator) else result

        setattr(owner, method, charged)

    def _charged(self, items: Iterator[Any], phase: str) -> Iterator[Any]:
        """Yield the items, and charge the time until each of them comes, not the time between."""
        while True:
            with self.phase(phase):
                item = next(items, self)
            if item is self:
                return
            yield item

    @contextmanager
    def phase(self, name: str):
        began = _now()
        self._inner.append(0j)
        try:
            yield
        finally:
            spent = _now() - began
            self._spent[name] = self._spent.get(name, 0j) + spent - self._inner.pop()
            self._inner[-1] += spent

    def end_of_step(self, numbers: dict[str, float]) -> None:
        before = self._of_workers
        self._of_workers = _worker_seconds()
        self._spent["prep"] = self._spent.get("prep", 0j) + complex(0, self._of_workers - before)
        self._spent["total"] = sum(self._spent.values())
        spent = {name: self._spent.get(name, 0j) for name in PHASES}
        row = {"step": len(self.rows) + 1, **numbers}
        row |= {name: value.real for name, value in spent.items()} | {
            f"{name}_cpu": value.imag for name, value in spent.items()
        }
        self.rows.append(
            row | {"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        )
        self._spent = {}


def _now() -> complex:
    """Return wall seconds, and CPU seconds as the imaginary part: one subtraction gives both."""
    return complex(time.perf_counter(), time.process_time())


def _worker_seconds() -> float:
    """Return the CPU seconds of all processes that this one has started, and that they started."""
    process = psutil.Process()
    times = process.cpu_times()
    seconds = times.children_user + times.children_system  # of those that have ended
    for worker in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = worker.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def train(flags: list[str]) -> list[dict[str, float]]:
    """Run the trainer on this rank; returns one row per step."""
    from lightrft.app.run.prepare import prepare_config
    from lightrft.app.trainer.build import ppo_trainer
    from lightrft.config import parse
    from lightrft.strategy import get_strategy

    config = prepare_config("train_ppo", parse(flags, "train_ppo"))
    strategy = get_strategy(config)
    strategy.setup_distributed()
    trainer = ppo_trainer(config, strategy)
    clock = watch(trainer)
    trainer.fit()
    strategy.close()
    return clock.rows


def watch(trainer: Any) -> Clock:
    from lightrft.core.advantages import PolicyLogprobs
    from lightrft.core.role import Learner
    from lightrft.core.sampler import RolloutLoop

    clock = Clock()
    numbers = {}

    for owner, method, phase in (
        (trainer, "step", "prep"),
        (trainer, "_report", "prep"),
        (Learner, "learn", "fwdbwd"),
        (RolloutLoop, "add", "gen"),
        (RolloutLoop, "steps", "gen"),
        (trainer.strategy.engine, "load_weights", "sync"),
        (trainer.strategy, "optimizer_step", "opt"),
        (PolicyLogprobs, "__call__", "old_logp"),
    ):
        clock.charge(owner, method, phase)

    def measure(number: int, samples: list, *others: Any) -> None:
        numbers["gen_tokens"] = sum(len(sample.token_ids) for sample in samples)
        numbers["prompt_tokens"] = sum(len(sample.prompt.token_ids) for sample in samples)
        numbers["reward"] = sum(sample.reward for sample in samples) / len(samples)

    trainer.learning_step.measures.append(measure)
    _after(trainer, "_report", lambda: clock.end_of_step(numbers))

    return clock


def _after(owner: Any, method: str, then: Callable[[], None]) -> None:
    original = getattr(owner, method)

    def both(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        then()

    setattr(owner, method, both)


def summary(rows: list[dict[str, float]], args: argparse.Namespace) -> dict[str, Any]:
    """Return means over the steps without the first two, which load and allocate."""
    warm = rows[2:] if len(rows) > 4 else rows[1:] or rows
    names = [*PHASES, *(f"{name}_cpu" for name in PHASES), "gen_tokens", "prompt_tokens", "reward"]
    means = {f"mean_{name}": round(sum(row[name] for row in warm) / len(warm), 5) for name in names}

    return {
        "summary": True,
        "gen": args.engine,
        "model": args.model.resolve().name if args.model else args.preset,
        "world": args.ranks,
        "steps": len(rows),
        **means,
        "rss_mb": round(rows[-1]["rss_mb"], 1),
    }


def flags(args: argparse.Namespace, folder: Path) -> list[str]:
    samples = args.prompts * args.samples
    return [
        "--fsdp",
        f"--pretrain={args.model or folder / 'model'}",
        f"--prompt_data={args.data or folder / 'prompts.jsonl'}",
        "--input_key=prompt",
        "--label_key=answer",
        "--prompt_max_len=32",
        f"--reward={Path(__file__).resolve()}:digits",
        f"--engine_type={args.engine}",
        *([f"--engine_args={args.engine_args}"] if args.engine_args else []),
        "--engine_kv_cache_gb=1",
        f"--rollout_batch_size={args.prompts}",
        f"--n_samples_per_prompt={args.samples}",
        f"--generate_max_len={args.max_new}",
        f"--train_batch_size={samples}",
        f"--micro_train_batch_size={max(args.micro // args.ranks, 1)}",
        "--advantage_estimator=grpo",
        "--use_kl_loss=false",
        "--init_kl_coef=0",
        "--learning_rate=1e-5",
        "--lr_scheduler=constant",
        "--lr_warmup_ratio=0",
        "--num_episodes=1000",
        f"--max_steps={args.steps}",
        f"--save_path={folder / 'run'}",
        "--report_to=jsonl",
        *args.more.split(),
    ]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = {"--ranks": 1, "--steps": 20, "--prompts": 8, "--samples": 8, "--micro": 16}
    own = {
        "--engine_args": ("", "of the trainer's flag, such as '{\"enforce_eager\": false}'"),
        "--more": ("", "other flags of the trainer, such as --more='--entropy_coef=0.01'"),
    }
    parser = parser_of(__doc__, flags | {"--max-new": 64} | own)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="of a fresh model")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="vllm")
    parser.add_argument("--model", type=Path, help="this model's folder instead of a fresh one")
    parser.add_argument(
        "--data", type=Path, help="JSONL with `prompt` and `answer` instead of fresh sums"
    )
    parser.add_argument("--out", type=Path, help="keep the lines here")
    # given to a rank by launch()
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)

    return parser.parse_args(argv)


def launch(args: argparse.Namespace, argv: list[str]) -> None:
    """Start one process per rank, in a folder that all of them see."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.model:
            make_model(folder / "model", PRESETS[args.preset])
        if not args.data:
            make_prompts(folder / "prompts.jsonl")
        on_ranks(args.ranks, __file__, [*argv, f"--folder={folder}"])
        lines = [(folder / f"rank{rank}.jsonl").read_text() for rank in range(args.ranks)]

    for rank, text in enumerate(lines if args.out else ()):
        Path(f"{args.out}.rank{rank}" if args.ranks > 1 else args.out).write_text(text)
    print(lines[0], end="")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    if args.folder is None:
        launch(args, argv)
        return
    import torch

    torch.set_num_threads(1)
    rows = train(flags(args, args.folder))
    lines = [*rows, summary(rows, args)]
    rank = int(os.environ["RANK"])
    (args.folder / f"rank{rank}.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


if __name__ == "__main__":
    main()
