"""Compare the measured noise of the gradient with that of resampled batches, and time the meter.

    lightrft quickstart                                        # the model and the data
    python -m scripts.bench.noise runs/quickstart --out runs/noise

One step of a pool of prompts gives the exact gradient of each sample. Batches of some of the
prompts are drawn from the pool, and what their gradients differ by is the noise; the meter sees the
sketches of their parts. `--write` puts the result into docs/noise.md.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.build import ppo_trainer
from lightrft.config import parse
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.extras.noise.components import noise_of, normal_equations
from lightrft.extras.noise.meter import MEMORY, NoiseMeter, random_parts
from lightrft.extras.noise.sketch import COUNTERS, Sketcher, num_blocks
from lightrft.strategy import get_strategy
from scripts.bench.harness import parser_of, write_measured

SAMPLES = 8
FLAGS = {
    "--pool": (128, "prompts with exact gradients"),
    "--prompts": (32, "prompts of a batch"),
    "--batches": 200,
    "--tokens": (2048, "of a micro-batch that is timed"),
    "--turns": 9,
}
RECIPE = f"""--engine_type hf --prompt_max_len 8 --generate_max_len 4 --n_samples_per_prompt {SAMPLES}
    --lr_scheduler constant --init_kl_coef 0 --learning_rate 4e-4 --loss_agg_mode token-mean
    --report_to jsonl --overwrite --reward exact_match --reward_workers 0 --eval_steps 0"""


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    text = "\n".join([*accuracy(options), "", cost(options)])
    print(text)
    if options.write:
        write_measured("noise.md", text)


def run_of(
    options: argparse.Namespace, name: str, prompts: int, steps: int, *flags: str
) -> list[str]:
    """Return the arguments of a run of the quick start's model."""
    return [
        *RECIPE.split(),
        f"--rollout_batch_size={prompts}",
        f"--train_batch_size={prompts * SAMPLES}",
        f"--pretrain={options.quickstart / 'sft' / 'model'}",
        f"--prompt_data={options.quickstart / 'data' / 'train.jsonl'}",
        f"--save_path={options.out / name}",
        f"--max_steps={steps}",
        *flags,
    ]


# -- accuracy


def accuracy(options: argparse.Namespace) -> list[str]:
    """Return the lines of a table: the noise of resampled batches, and what the meter says of them."""
    gradients, sketches = sample_gradients(options)
    mean = gradients.mean(0)
    signal = float(mean @ mean)
    deviations = (gradients - mean).double().numpy()
    generator = np.random.default_rng(0)

    squares = []
    equations = np.zeros((3, 4))
    scales = []
    for seed in range(options.batches):
        drawn = generator.integers(options.pool, size=options.prompts)
        rows = np.concatenate([np.arange(SAMPLES) + SAMPLES * each for each in drawn])
        error = deviations[rows].mean(0)
        squares.append(float(error @ error))

        equations = MEMORY * equations + of_parts(rows, sketches, seed)
        scales.append(noise_of(equations, SAMPLES).get("scale", np.inf))

    size = options.prompts * SAMPLES
    exact = size * statistics.mean(squares) / signal
    low, middle, high = np.quantile(np.array(scales[20:]) / exact, [0.05, 0.5, 0.95])
    return [
        f"{options.batches} batches of {options.prompts} prompts with {SAMPLES} samples, drawn from"
        f" {options.pool} prompts: their gradients differ from the mean of all by as much as a noise"
        f" scale of {exact:.0f} samples says. The meter's scale is {middle:.2f} of that (median), and"
        f" {low:.2f} to {high:.2f} in 90 % of the steps.",
        "",
        error_of(sketches, gradients),
    ]


def error_of(sketches: np.ndarray, gradients: torch.Tensor) -> str:
    """Say how far products of two sketches are from those of the gradients, [N, D]."""
    exact = (gradients @ gradients.T).double().numpy()
    lengths = np.sqrt(np.diag(exact))
    used = lengths > 0  # a group of equal rewards has no gradient
    errors = ((sketches @ sketches.T - exact) / np.outer(lengths, lengths).clip(1e-30))[used][
        :, used
    ]
    first, second = np.triu_indices(len(errors), 1)
    pairs, squares = errors[first, second], np.diag(errors)
    return (
        f"The products of the sketches of {len(errors)} samples with those of others differ from the"
        f" products of the gradients by {pairs.std():.2%} of the product of their norms (standard"
        f" deviation; {pairs.mean():+.2%} in the mean), and those with themselves by {squares.std():.2%}."
    )


def of_parts(rows: np.ndarray, sketches: np.ndarray, seed: int) -> np.ndarray:
    """Return the normal equations of a batch, in parts as the meter makes them."""
    prompts = np.arange(len(rows)) // SAMPLES
    parts = random_parts(list(range(len(rows))), prompts.tolist(), 1, seed=seed)
    sums = np.stack([sketches[rows[members]].sum(0) for members in parts])
    counts = np.zeros((len(parts), prompts[-1] + 1))
    for part, members in enumerate(parts):
        np.add.at(counts[part], prompts[members], 1)
    return normal_equations(sums @ sums.T, counts)


def sample_gradients(options: argparse.Namespace) -> tuple[torch.Tensor, np.ndarray]:
    """Return the gradient of each sample of one step, [N, D], and the sketches, [N, COUNTERS]."""
    flags = run_of(options, "pool", options.pool, 1)
    config = prepare_config("train_ppo", parse(flags, "train_ppo"))
    torch.manual_seed(0)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    trainer = ppo_trainer(config, strategy)
    step = trainer.learning_step
    samples, _ = step.collect(1, Metrics())
    plan = step.make_experience(samples, Metrics())
    learner = step.learners[-1]
    role = learner.role
    denominator = replace(role.denominator(plan.experience, plan.updates[0]), updates_before=0)

    order = torch.argsort(plan.experience.groups, stable=True).tolist()
    parameters = [each for each in role.module.parameters() if each.requires_grad]
    sketcher = Sketcher(strategy.device)
    gradients = torch.zeros(len(order), sum(each.numel() for each in parameters))
    sketches = torch.zeros(len(order), COUNTERS)
    role.begin(len(order) + 1)  # the step is never finished
    for index, row in enumerate(order):
        term = LossTerm(plan.experience, [[row]], learner.objective, denominator)
        role.add_gradients(strategy.to_device(plan.experience.select([row])), term)
        gradients[index] = torch.cat([each.grad.flatten() for each in parameters])
        block = 0
        for each in parameters:
            sketcher.add(sketches[index], each.grad, block)
            block += num_blocks(each.numel())
        role.module.zero_grad()

    strategy.close()
    return gradients, sketches.double().numpy()


# -- cost


class TimedMeter(NoiseMeter):
    """A meter that adds up the seconds of its hooks."""

    seconds = 0.0

    def _read_parameters(self, *arguments: Any) -> None:
        with self._timed():
            super()._read_parameters(*arguments)

    def _read(self, *arguments: Any) -> None:
        with self._timed():
            super()._read(*arguments)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds += time.process_time() - began


def cost(options: argparse.Namespace) -> str:
    """Say what share the hooks of the meter have in the passes of a model of 32 million parameters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8192, **shape, **heads))
    ids = torch.randint(8192, (1, options.tokens))
    strategy = get_strategy({})

    shares = []
    seconds = []
    for _ in range(options.turns + 1):
        meter = TimedMeter(strategy, every=1)
        with meter.reading(model, [0]):
            began = time.process_time()
            model(ids, labels=ids).loss.backward()
            whole = time.process_time() - began
        shares.append(meter.seconds / (whole - meter.seconds))
        seconds.append(meter.seconds)

    shares, seconds = shares[1:], seconds[1:]  # the first turn allocates
    return (
        f"On one core of {processor()}, sketches of a model of {model.num_parameters() / 1e6:.0f} million"
        f" parameters take {1000 * statistics.median(seconds):.0f} ms of each micro-batch. For"
        f" {options.tokens:,} tokens that is {statistics.median(shares):.2%} of the passes (median of"
        f" {options.turns} turns; from {min(shares):.2%} to {max(shares):.2%})."
    )


def processor() -> str:
    """Return the name of the processor, on Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, FLAGS)
    parser.add_argument("quickstart", type=Path, help="folder of the quick start")
    parser.add_argument("--out", type=Path, default=Path("runs/noise"))
    parser.add_argument("--write", action="store_true", help="write the lines into the page")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
