"""Measure what calls of a reward function cost the generation beside them.

They run in worker processes, and in a thread of this process.

    python scripts/bench/rewards.py  # the line in docs/benchmarks.md, about a minute
    python scripts/bench/rewards.py --calls 40 --repeat 1 --engine_seconds 1

`overhead_ms` is the time of a call of a function that does nothing, with 8 responses of 512 tokens,
over all calls, and `overhead_cpu_ms` the part that this process computes. The engine is stood in
for by a loop of small matrix products and of plain Python in equal parts, as an engine stepped in
this process is. It runs for some seconds beside reward calls that compute in plain Python without a
pause: `workers_of_alone` and `thread_of_alone` are its steps against those without rewards. Two
cores at least, or the processes share one with the engine.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch
from reward_functions import busy

from lightrft.app.cli import SWITCH_INTERVAL
from lightrft.config import RewardSection
from lightrft.core.samples import Prompt, Sample
from lightrft.rewards.runner import RewardRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of

RESPONSES = 8
TOKENS = 512
FUNCTIONS = Path(__file__).resolve().with_name("reward_functions.py")


def group() -> list[Sample]:
    prompt = Prompt(0, "question", range(64), {"label": "answer"})
    return [
        Sample(prompt, 0, list(range(TOKENS)), [-0.5] * TOKENS, "x" * TOKENS, "stop")
        for _ in range(RESPONSES)
    ]


def runner(function: str) -> RewardRunner:
    return RewardRunner(f"{FUNCTIONS}:{function}", section=RewardSection(reward_workers=1))


def overhead(calls: int) -> tuple[float, float]:
    """Return the milliseconds of a call, and how many of them this process computes."""
    reward_runner = runner("nothing")
    groups = [group() for _ in range(calls)]
    reward_runner(groups[0])
    began = time.perf_counter()
    busy_before = time.process_time()
    for each in groups:
        reward_runner.begin(each)
    reward_runner.finish([sample for each in groups for sample in each])

    return 1000 * (time.perf_counter() - began) / calls, 1000 * (
        time.process_time() - busy_before
    ) / calls


def engine_steps(seconds: float) -> int:
    matrix = torch.ones(64, 64)
    steps = 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(0, 1)
        sum(range(5000))
        steps += 1
    return steps


def beside_workers(seconds: float) -> int:
    reward_runner = runner("busy")
    groups = [group() for _ in range(int(seconds / 0.02) + 50)]
    reward_runner(groups[0])
    for each in groups:
        reward_runner.begin(each)
    return engine_steps(seconds)


def beside_a_thread(seconds: float) -> int:
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            busy(group())

    thread = threading.Thread(target=work)
    thread.start()
    steps = engine_steps(seconds)
    done.set()
    thread.join()
    return steps


def main() -> None:
    flags = {"--calls": 500, "--repeat": 3, "--engine_seconds": 5.0}
    args = parser_of(__doc__, flags).parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL)  # as in a run

    rows = []
    for _ in range(args.repeat):
        alone = engine_steps(args.engine_seconds)
        rows.append(
            (
                beside_workers(args.engine_seconds) / alone,
                beside_a_thread(args.engine_seconds) / alone,
            )
        )

    workers, thread = (sorted(each)[len(rows) // 2] for each in zip(*rows, strict=True))
    wall, processor = (
        min(each) for each in zip(*[overhead(args.calls) for _ in range(args.repeat)], strict=True)
    )
    figures = {
        "overhead_ms": wall,
        "overhead_cpu_ms": processor,
        "workers_of_alone": workers,
        "thread_of_alone": thread,
    }
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in figures.items()}) + "\n")


if __name__ == "__main__":
    main()
