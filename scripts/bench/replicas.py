"""Compare two ranks with one on the supervised part of the quick start, at equal tokens per step.

    python scripts/bench/replicas.py           # the first table in docs/benchmarks.md, five minutes
    python scripts/bench/replicas.py --bound   # the second, ten minutes

Two ranks have shards of the model (FSDP2), or each has the whole model (--dp_replicate 0). The
bound are two processes that do not communicate, each with half of the rows. `--bound` adds a bare
loop of torch over the same rows, padded: transformers' model, AdamW and clipping, and between two
ranks DistributedDataParallel. `--hidden` and `--layers` make a larger random model.

All ways take turns. A step is the median of a run without its first steps, in wall-clock and in
CPU milliseconds of a process. CPU time leaves out what waits, such as for another program or rank.
One thread per process. The last line is one JSON object.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import TORCHRUN, in_turn, parser_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = 64
"""Rows of a step, over all processes."""
LONGEST = 900
"""Seconds of a run. Ranks of gloo that begin together hang now and then."""
WARM_UP = 20
"""Number of steps that do not count."""


class Way(NamedTuple):
    """A way to run a step of all rows: with so many separate runs, each of so many ranks."""

    runs: int = 1
    ranks: int = 1
    loop: str = "lightrft"
    replicas: int = 1  # --dp_replicate


WAYS = {
    "one rank": Way(),
    "two ranks, sharded": Way(ranks=2),
    "two ranks, a replica each": Way(ranks=2, replicas=0),
    "two processes that do not communicate": Way(runs=2),
}
BOUND = {
    "one rank": Way(),
    "two ranks, a replica each": Way(ranks=2, replicas=0),
    "two processes that do not communicate": Way(runs=2),
    "bare loop, one rank": Way(loop="bare"),
    "bare loop, two ranks": Way(ranks=2, loop="bare"),
    "bare loop, two processes that do not communicate": Way(runs=2, loop="bare"),
}


class Milliseconds(NamedTuple):
    wall: float
    cpu: float


def step_of(way: Way, data: Path, folder: Path, steps: int) -> Milliseconds:
    """Run all processes of a way at the same time; return the time of a step."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = [__file__, f"--loop={way.loop}", f"--data={data}", f"--steps={steps}"]
    options = [f"--rows={ROWS // way.runs}", f"--replicas={way.replicas}"]
    files = [folder / f"run{run}" for run in range(way.runs)]
    started = [
        subprocess.Popen(
            [*TORCHRUN, f"--nproc-per-node={way.ranks}", *script, *options, f"--out={file}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for file in files
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=LONGEST)
            if process.returncode:
                raise RuntimeError(errors.decode())
    finally:
        for process in started:
            process.terminate()

    found = [Milliseconds(*json.loads(Path(f"{file}.json").read_text())) for file in files]
    return Milliseconds(*(statistics.mean(column) for column in zip(*found, strict=True)))


class Clock:
    """Records when each step begins."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def tick(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def median(self) -> Milliseconds:
        times = self.times[WARM_UP:] if len(self.times) > 2 * WARM_UP else self.times[1:]
        return Milliseconds(
            *(
                1000 * statistics.median(b - a for a, b in zip(column, column[1:], strict=False))
                for column in zip(*times, strict=True)
            )
        )


def lightrft_loop(args: Any) -> Clock:
    """Run the trainer as it is, and record its steps."""
    from lightrft.app.run.prepare import prepare_config
    from lightrft.app.trainer.build_supervised import supervised_trainer
    from lightrft.config import parse
    from lightrft.strategy import get_strategy

    flags = [
        *("--config", str(ROOT / "configs/quickstart_sft.yaml"), "--overwrite", "--stop_loss=0"),
        *(f"--pretrain={args.data}/model", f"--prompt_data={args.data}/train.jsonl"),
        *(f"--save_path={args.out}", f"--train_batch_size={args.rows}"),
        *(f"--max_steps={args.steps}", f"--dp_replicate={args.replicas}"),
    ]
    config = prepare_config("train_sft", parse(flags, "train_sft"))
    strategy = get_strategy(config)
    strategy.setup_distributed()
    trainer = supervised_trainer("train_sft", config, strategy)

    clock = Clock()
    step = trainer.step

    def timed(number: int) -> Any:
        clock.tick()
        return step(number)

    trainer.step = timed
    trainer.fit()
    strategy.close()
    return clock


def bare_loop(args: Any) -> Clock:
    """Learn the same rows with torch alone."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(f"{args.data}/model")
    model = AutoModelForCausalLM.from_pretrained(f"{args.data}/model", dtype=torch.float32)
    learner = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    rows = [json.loads(line) for line in Path(f"{args.data}/train.jsonl").read_text().splitlines()]

    clock = Clock()
    for number in range(args.steps):
        clock.tick()
        start = number * args.rows % (len(rows) - args.rows)
        part = rows[start : start + args.rows][rank::ranks]
        texts = [row["input"] + row["label"] + tokenizer.eos_token for row in part]
        batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)

        loss = learner(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    dist.destroy_process_group()
    return clock


LOOPS: dict[str, Callable[[Any], Clock]] = {"lightrft": lightrft_loop, "bare": bare_loop}


def make_data(folder: Path, hidden: int, layers: int) -> None:
    """Write the problems of the quick start, and its model or a larger one."""
    script = ROOT / "scripts/prepare_quickstart.py"
    subprocess.run([sys.executable, script, "--out", folder], check=True, capture_output=True)
    if not hidden:
        return

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / "model")
    config.hidden_size = hidden
    config.intermediate_size = 3 * hidden
    config.num_attention_heads = hidden // config.head_dim
    config.num_key_value_heads = hidden // config.head_dim // 2
    config.num_hidden_layers = layers
    config.layer_types = None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(type(config)(**config.to_dict())).save_pretrained(
        folder / "model"
    )


def main(argv: list[str] | None = None) -> None:
    flags = {
        "--steps": (200, "steps of a run"),
        "--repeat": (5, "runs of each way"),
        "--hidden": (0, "width of a larger model; 0: the quick start's own model"),
        "--layers": (8, "its layers"),
        # of a process that main() starts
        "--loop": "",
        "--data": "",
        "--out": "",
        "--rows": ROWS,
        "--replicas": 1,
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument("--bound", action="store_true", help="measure what two processes can reach")
    args = parser.parse_args(argv)
    if args.loop:
        import torch

        torch.set_num_threads(1)
        found = LOOPS[args.loop](args).median()
        if int(os.environ["RANK"]) == 0:
            Path(f"{args.out}.json").write_text(json.dumps(found))
        return

    named = BOUND if args.bound else WAYS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "data", args.hidden, args.layers)
        ways = {
            way: partial(step_of, how, folder / "data", folder, args.steps)
            for way, how in named.items()
        }
        found = in_turn(ways, args.repeat)

    for way, how in named.items():
        one = found["one rank" if how.loop == "lightrft" else "bare loop, one rank"]
        columns = [
            f"{statistics.median(getattr(each, clock) for each in found[way]):.1f} ms | "
            + _ratio(
                [getattr(each, clock) for each in one], [getattr(t, clock) for t in found[way]]
            )
            for clock in Milliseconds._fields
        ]
        print(f"| {way} | {' | '.join(columns)} |")
    print(json.dumps(found))


def _ratio(one: list[float], other: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
