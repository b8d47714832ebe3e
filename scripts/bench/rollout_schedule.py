"""What --rollout_schedule gives: an event simulator, and vLLM on two ranks with the same lengths of responses.

    torchrun --standalone --nproc_per_node 2 scripts/bench/rollout_schedule.py          # docs/benchmarks.md, five minutes
    python scripts/bench/rollout_schedule.py --step_ms 10 0.05 0 --ranks 8 64 1024        # the simulator alone

A step of an engine with b running responses takes base + b * per_response milliseconds, and a request per_request once: fitted
on vLLM in the same run, or `--step_ms`. Lengths of responses are drawn from stored distributions. The simulator runs the passes over the data that the
collector runs, with its own `Round`, and counts the time of the rank that takes longest in each round. With two ranks the
collector itself then runs with vLLM, whose responses are forced to those lengths, schedules interleaved; its time is CPU time of
the rank that takes longest in each step, since other programs may share the cores. Prints one JSON object as its last line.
"""

import argparse
import itertools
import json
import os
import time
from dataclasses import replace
from heapq import heapify, heapreplace
from math import ceil
from typing import Any

import numpy as np

from lightrft.config import RolloutSection
from lightrft.rollout.schedule import Parked, Round, next_tail_round

PERCENTILES = [0, 10, 25, 50, 75, 90, 95, 99, 100]
STORED = {
    "short_answers": [0.05, 0.4, 0.6, 1.0, 1.5, 2.2, 2.8, 4.5, 8.0],
    "long_tail": [0.05, 0.2, 0.4, 1.0, 2.5, 6.0, 9.0, 14.0, 16.0],
}
"""Lengths at PERCENTILES as multiples of the median, between which they are interpolated; invented, as two extremes."""


def draw_lengths(distribution: str, shape: tuple[int, int], *, median: float, most: int, seed: int) -> np.ndarray:
    """Return lengths [prompts, n] int64 of responses."""
    generator = np.random.default_rng(seed)
    if distribution == "log_normal":
        multiples = np.exp(generator.standard_normal(shape))
    else:
        multiples = np.interp(generator.random(shape) * 100, PERCENTILES, STORED[distribution])
    return np.clip(np.rint(median * multiples), 1, most).astype(np.int64)


class Simulation:
    """One way of running prompts on simulated ranks. All times are in milliseconds."""

    def __init__(self, section: RolloutSection, *, num_ranks: int, slots: int, step_ms: tuple[float, float, float]):
        self.section, self.num_ranks, self.slots = section, num_ranks, slots
        self.base, self.per_response, self.per_request = step_ms

    def epoch(self, lengths: np.ndarray, expected: np.ndarray) -> float:
        """Return the time of generating each prompt once; lengths [prompts, n], expected [prompts] before the pass."""
        batch, place, total, learned = self.section.rollout_batch_size, 0, 0.0, 0
        ahead = ceil(batch * self.section.over_sampling)
        parked: list[Parked] = []
        while learned < len(lengths):
            again, new = [], batch
            if self.section.rollout_schedule == "tail_rounds":
                again, new = next_tail_round(parked, len(lengths) - place, batch=batch, ahead=ahead)
            drawn = again + [(0, row, row) for row in range(place, place + new)]
            rows = [row for *_, row in drawn]
            duration, complete = self._round(lengths[rows], expected[rows], batch)
            chosen = {rows[index] for index in complete[:batch]}
            left = [(times + (index not in complete), row, row)
                    for index, (times, _, row) in enumerate(drawn) if row not in chosen]  # fmt: skip
            parked = sorted([each for each in parked if each not in again] + left)
            place, total, learned = place + new, total + duration, learned + batch
        return total

    def _round(self, lengths: np.ndarray, expected: np.ndarray, needed: int) -> tuple[float, list[int]]:
        """Return the time of a round and its complete groups."""
        if self.section.rollout_schedule == "longest_first":
            return self._shared_round(lengths, expected), list(range(len(lengths)))
        owners = np.arange(len(lengths)) * self.num_ranks // len(lengths)
        spans = [self._queued(lengths[owners == rank].reshape(-1)) for rank in range(self.num_ranks)]
        ends = np.concatenate([end for _, end in spans]).reshape(lengths.shape).max(1)
        if needed == len(lengths):
            return max(self._time(start, end) for start, end in spans), list(range(len(lengths)))
        every = self.section.early_stop_every
        enough = np.sort(ends)[needed - 1]
        stop = (ceil(enough / every) + 1) * every  # counted at one point, decided at the next
        return max(self._time(start, np.minimum(end, stop), stop) for start, end in spans), np.flatnonzero(ends <= stop).tolist()

    def _queued(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps at which responses of one engine start and end; those beyond its slots wait, in order."""
        starts = np.zeros_like(lengths)
        if len(lengths) > self.slots:
            running = lengths[: self.slots].tolist()
            heapify(running)
            for index in range(self.slots, len(lengths)):
                starts[index] = running[0]
                heapreplace(running, running[0] + int(lengths[index]))
        return starts, starts + lengths

    def _time(self, start: np.ndarray, end: np.ndarray, stop: int | None = None) -> float:
        kept = start < (stop or end.max(initial=0) + 1)
        tokens = (end - start)[kept].sum()
        return self.base * end[kept].max(initial=0) + self.per_response * tokens + self.per_request * kept.sum()

    def _shared_round(self, lengths: np.ndarray, expected: np.ndarray) -> float:
        """Return the time of a round in which groups begin on ranks with room, by the decisions of Round."""
        every, num_groups = self.section.early_stop_every, len(lengths)
        room = max(1, self.slots // lengths.shape[1])
        round = Round(expected.tolist(), [None] * num_groups, num_ranks=self.num_ranks, needed=num_groups, room=room)
        begun = np.full(num_groups, -1)
        clock = np.zeros(self.num_ranks)
        counts, step = None, 0
        while True:
            if counts is not None:
                round.decide(counts.tolist())
            owners = np.array([-1 if owner is None else owner for owner in round.owners])
            new = (owners >= 0) & (begun < 0)
            begun[new] = step
            requests = lengths.shape[1] * np.bincount(owners[new], minlength=self.num_ranks)
            left = np.clip(begun[:, None] + lengths - step, 0, None) * (begun >= 0)[:, None]  # tokens that are left
            until = every if round.open else left.max(initial=0)
            round.begin_exchange()
            counts = (left > 0).sum(1)
            work = np.minimum(left, until)
            tokens = np.bincount(np.maximum(owners, 0), (work.sum(1) * (owners >= 0)), self.num_ranks)
            steps = np.zeros(self.num_ranks)
            np.maximum.at(steps, owners[owners >= 0], work.max(1)[owners >= 0])
            own = clock + self.base * steps + self.per_response * tokens + self.per_request * requests
            if not round.open:
                return float(own.max())
            clock = np.maximum(own, clock.max())  # the counts of the last point have to be there
            step += every


def sections(args: argparse.Namespace, batch: int) -> dict[str, RolloutSection]:
    plain = RolloutSection(rollout_batch_size=batch, n_samples_per_prompt=args.samples, early_stop_every=args.every,
                           generate_max_len=args.most)  # fmt: skip
    tail = {f"tail_rounds_{factor}": replace(plain, rollout_schedule="tail_rounds", over_sampling=factor)
            for factor in args.over_sampling}
    return {"fifo": plain, "longest_first": replace(plain, rollout_schedule="longest_first"), **tail}


def expected_lengths(lengths: np.ndarray, seed: int) -> np.ndarray:
    """Return the mean lengths of groups as an earlier visit tells them: off by a factor of log-normal noise."""
    noise = np.random.default_rng(seed).standard_normal(len(lengths))
    return lengths.mean(1) * np.exp(0.3 * noise)


def simulate(args: argparse.Namespace, step_ms: tuple[float, float, float]) -> list[dict]:
    rows = []
    for distribution, num_ranks in itertools.product(["log_normal", *STORED], args.ranks):
        batch = args.prompts_per_rank * num_ranks
        lengths = draw_lengths(distribution, (args.steps * batch, args.samples), median=args.median, most=args.most, seed=1)
        expected, times = expected_lengths(lengths, 2), {}
        for name, section in sections(args, batch).items():
            times[name] = Simulation(section, num_ranks=num_ranks, slots=args.slots, step_ms=step_ms).epoch(lengths, expected)
        rows.append({"distribution": distribution, "ranks": num_ranks,
                     "speedup": {name: round(times["fifo"] / each, 2) for name, each in times.items()}})  # fmt: skip
    return rows


# -- the collector with vLLM


def measure(args: argparse.Namespace) -> tuple[tuple[float, float, float], dict]:
    """Return the fitted milliseconds of a step (base, per response, per request), and measured and simulated times on these ranks."""
    import torch
    import torch.distributed as dist
    from vllm_ranks import Ranks, forced_collector

    ranks = Ranks(args.most)
    step_ms = fit(ranks)
    batch = args.real_prompts
    lengths = draw_lengths("log_normal", (args.real_steps * batch, args.samples), median=args.real_median, most=args.most, seed=1)
    expected = expected_lengths(lengths, 2)
    chosen = sections(args, batch)
    measured, simulated = {name: [] for name in chosen}, {}
    for _, (name, section) in itertools.product(range(args.repeat), chosen.items()):
        collector, collect = forced_collector(ranks, section, lengths, expected)
        total = 0.0
        for number in range(1, args.real_steps + 1):
            dist.barrier()
            began = time.process_time()
            collect(number)
            spent = torch.tensor(time.process_time() - began, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            total += float(spent)
        measured[name].append(1000 * total)
    for name, section in chosen.items():
        rows = collector.order.rows(0, len(lengths))
        simulation = Simulation(section, num_ranks=dist.get_world_size(), slots=args.slots, step_ms=step_ms)
        simulated[name] = simulation.epoch(lengths[rows], expected[rows])
    best = {name: min(times) for name, times in measured.items()}
    return step_ms, {
        "measured_s": {name: round(each / 1000, 2) for name, each in best.items()},
        "simulated_of_measured": {name: round(simulated[name] / each, 2) for name, each in best.items()},
        "speedup_measured": {name: round(best["fifo"] / each, 2) for name, each in best.items()},
        "speedup_simulated": {name: round(simulated["fifo"] / each, 2) for name, each in simulated.items()},
    }


def fit(ranks: Any) -> tuple[float, float, float]:
    """Fit CPU milliseconds of vLLM for several numbers of running responses, on all ranks at once."""
    sizes = [1, 2, 4, 8, 16, 32]
    times = np.array([min(ranks.step_ms(size) for _ in range(3)) for size in sizes])
    weights = 1 / times  # relative errors count
    design = np.stack([np.ones(len(sizes)), np.array(sizes)], 1) * weights[:, None]
    (base, per_response), *_ = np.linalg.lstsq(design, times * weights, rcond=None)
    per_request = min(ranks.request_ms() for _ in range(5)) - per_response
    return float(base), float(per_response), float(per_request)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--step_ms", type=float, nargs=3, help="base, per response, per request; default: fitted on vLLM")
    parser.add_argument("--prompts_per_rank", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="steps in a pass over the data")
    parser.add_argument("--median", type=float, default=1000)
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--slots", type=int, default=256, help="responses that an engine decodes at once")
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--over_sampling", type=float, nargs="+", default=[1.5, 2.0])
    parser.add_argument("--real_prompts", type=int, default=8)
    parser.add_argument("--real_steps", type=int, default=12)
    parser.add_argument("--real_median", type=float, default=64)
    parser.add_argument("--real_most", type=int, default=1024)
    parser.add_argument("--real_every", type=int, default=16)
    parser.add_argument("--real_samples", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = options()
    result, step_ms = {}, args.step_ms
    if "RANK" in os.environ:
        real = argparse.Namespace(**vars(args) | {"samples": args.real_samples, "most": args.real_most, "every": args.real_every})
        fitted, result["two_ranks"] = measure(real)
        result["fitted_step_ms"] = [round(each, 4) for each in fitted]
        step_ms = step_ms or fitted
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"step_ms": step_ms, **result, "simulated": simulate(args, tuple(step_ms or (10.0, 0.05, 0.0)))}))


main()
