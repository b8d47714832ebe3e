"""Measure --rollout_schedule with an event simulator, and with vLLM on two ranks with the same
lengths of responses.

    # docs/benchmarks.md, five minutes
    torchrun --standalone --nproc_per_node 2 scripts/bench/rollout_schedule.py
    # the simulator alone
    python scripts/bench/rollout_schedule.py --step_ms 10 0.05 0 0 --ranks 8 64 1024
    python scripts/bench/rollout_schedule.py --step_ms 10 0.05 0 0 --ranks 8 64 1024 --samples 16 --slots 16 --steps 10 \\
        --correlation 0.7 --visits 0  # prompts differ in length, and nothing of them is known

A step of an engine takes base + per_response milliseconds for each running response + per_context
for each token before those that are sampled, and each request per_request once: fitted on vLLM in
runs of their own, or `--step_ms`. Lengths of responses are drawn from stored distributions. The
simulator runs the passes over the data that the collector runs, with its own `Assignment`. With two
ranks the collector itself then runs with vLLM, whose responses are forced to those lengths. Other
programs may share the cores, so its time is CPU time, of the rank that takes longest in each
training step: schedules take turns, everything is repeated, and the least time of each step of the
engine counts, as in the fit. `known_lengths` is a bound: prompts are sorted by their longest
response, so that every step has prompts of one length. `longest_first_whole` does not divide
groups, and `longest_first_blind` predicts nothing from responses that have ended. Prints one JSON
object as its last line.
"""

import argparse
import itertools
import json
import os
import sys
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path

import numpy as np
import torch

from lightrft.algorithms.schedulers.assignment import Assignment
from lightrft.algorithms.schedulers.tail_rounds import DeferredGroup, next_tail_round
from lightrft.config import RolloutSection
from lightrft.core.order import fair_owners

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of

PERCENTILES = [0, 10, 25, 50, 75, 90, 95, 99, 100]
STORED = {
    "short_answers": [0.05, 0.4, 0.6, 1.0, 1.5, 2.2, 2.8, 4.5, 8.0],
    "long_tail": [0.05, 0.2, 0.4, 1.0, 2.5, 6.0, 9.0, 14.0, 16.0],
}
"""Lengths at PERCENTILES as multiples of the median; between them they are interpolated.

They are invented, as two extremes.
"""


def draw_lengths(
    distribution: str,
    shape: tuple[int, int],
    *,
    median: float,
    most: int,
    seed: int,
    correlation: float = 0.0,
) -> np.ndarray:
    """Return lengths [prompts, n] int64 of responses.

    `correlation` is between two responses to a prompt. It holds for the normal variables that the
    distribution's quantiles are taken of (for the log-normal one: for the logarithms).
    """
    generator = np.random.default_rng(seed)
    own = generator.standard_normal(shape)
    shared = generator.standard_normal((shape[0], 1))
    normal = sqrt(1 - correlation) * own + sqrt(correlation) * shared
    if distribution == "log_normal":
        multiples = np.exp(normal)
    else:
        shares = torch.special.ndtr(torch.from_numpy(normal)).numpy()
        multiples = np.interp(shares * 100, PERCENTILES, STORED[distribution])
    return np.clip(np.rint(median * multiples), 1, most).astype(np.int64)


Costs = tuple[float, float, float, float]
"""Milliseconds of a step, for each running response, for each earlier token, and of a request."""
NEVER = 1 << 40


class Simulation:
    """One way of running prompts on simulated ranks."""

    def __init__(
        self,
        section: RolloutSection,
        *,
        num_ranks: int,
        slots: int,
        costs: Costs,
        divides: bool = True,
        predicts: bool = True,
    ):
        self.section = section
        self.num_ranks = num_ranks
        self.slots = slots
        self.costs = np.array(costs)
        self.divides = divides
        self.predicts = predicts
        self.elapsed = 0.0
        """Milliseconds until the last rank is ready in each round, with its waits for others in the
        round."""
        self.rounds: list[np.ndarray] = []
        """Work [ranks, 4] of each round: steps, tokens, tokens before them, and requests."""

    def epoch(self, lengths: np.ndarray, expected: np.ndarray) -> "Simulation":
        """Generate each prompt once.

        `lengths` are [prompts, n], `expected` [prompts] what is known before the pass.
        """
        batch = self.section.rollout_batch_size
        place = 0
        learned = 0

        ahead = ceil(batch * self.section.over_sampling)
        deferred: list[DeferredGroup] = []
        while learned < len(lengths):
            again = []
            new = batch
            if self.section.rollout_schedule == "tail_rounds":
                again, new = next_tail_round(
                    deferred, len(lengths) - place, batch=batch, ahead=ahead
                )
            drawn = again + [(0, row, row) for row in range(place, place + new)]
            complete = {drawn[index] for index in self._round(drawn, lengths, expected)}
            chosen = set(sorted(complete, key=lambda each: each[1])[:batch])
            left = {
                (times + ((times, number, row) not in complete), number, row)
                for times, number, row in {*drawn} - chosen
            }
            deferred = sorted({*deferred}.difference(again) | left)
            place = place + new
            learned = learned + len(chosen)

        return self

    def _round(
        self, drawn: list[DeferredGroup], lengths: np.ndarray, expected: np.ndarray
    ) -> list[int]:
        """Run a round; return the indices of its complete groups."""
        rows = [row for *_, row in drawn]
        lengths = lengths[rows]
        expected = expected[rows].tolist()
        needed = self.section.rollout_batch_size

        free = [[0] * self.slots for _ in range(self.num_ranks)]
        if self.section.rollout_schedule == "longest_first":
            starts, owners, points = self._shared(lengths, expected, free)
        else:
            ranks = fair_owners(self.num_ranks, expected)
            starts = np.stack(
                [
                    self._begin(each, free[rank], 0)
                    for each, rank in zip(lengths, ranks, strict=True)
                ]
            )
            owners = np.array(ranks)[:, None].repeat(lengths.shape[1], 1)
            points = [0]

        ends = starts + lengths
        stop = int(ends.max())
        if needed < len(lengths):
            every = self.section.early_stop_every
            # counted at one point, decided at the next
            stop = (ceil(np.sort(ends.max(1))[needed - 1] / every) + 1) * every
            points = list(range(0, stop, every))

        self._spend(starts, lengths, owners, [*points, stop])
        return np.flatnonzero(ends.max(1) <= stop).tolist()

    def _begin(self, lengths: np.ndarray, free: list[int], point: int) -> list[int]:
        """Return the steps where the responses [n] that an engine gets at a point start.

        `free` is a heap of the steps where its slots become free. Responses without a slot wait, in
        order.
        """
        return [
            max(point, heapreplace(free, max(point, free[0]) + length))
            for length in lengths.tolist()
        ]

    def _shared(
        self, lengths: np.ndarray, expected: list[float], free: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return starts and owners [groups, n], and points of exchange, as Assignment decides."""
        num_groups, n = lengths.shape
        round = Assignment(
            expected,
            [None] * num_groups,
            n,
            num_ranks=self.num_ranks,
            needed=num_groups,
            at_once=self.slots,
            divided=self.divides,
        )
        starts = np.full(lengths.shape, NEVER)
        owners = np.zeros(lengths.shape, np.int64)
        first = np.array([chunk.group * n + chunk.responses.start for chunk in round.chunks])
        predicted = lengths if self.predicts else np.array(expected)[:, None].repeat(n, 1)

        points = [0]
        begun = 0
        while True:
            for index in round.started[begun:]:
                place = round.chunks[index].group
                responses = list(round.chunks[index].responses)
                owner = round.owners[index]
                starts[place, responses] = self._begin(
                    lengths[place, responses], free[owner], points[-1]
                )
                owners[place, responses] = owner

            begun = len(round.started)
            if not round.open:
                return starts, owners, points

            round.begin_exchange()
            runs = starts + lengths > points[-1]
            tokens = np.add.reduceat(np.where(runs, 0, predicted).ravel(), first)
            points.append(points[-1] + self.section.early_stop_every)
            round.decide(
                np.add.reduceat(runs.ravel(), first, dtype=np.int64).tolist(), tokens.tolist()
            )

    def _spend(
        self, starts: np.ndarray, lengths: np.ndarray, owners: np.ndarray, points: list[int]
    ) -> None:
        """Add the time between points.

        At each point the counts that were taken at the last one have to be there.
        """
        clock = np.zeros(self.num_ranks)
        total = np.zeros((self.num_ranks, 4))
        for begin, end in pairwise(points):
            runs = (starts < end) & (starts + lengths > begin)
            start = starts[runs]
            length = lengths[runs]
            owner = owners[runs]
            before, after = (np.clip(point - start, 0, length) for point in (begin, end))
            steps = np.zeros(self.num_ranks)
            np.maximum.at(steps, owner, np.minimum(start + length, end) - begin)
            sums = after - before, (after**2 - before**2) / 2, start >= begin
            work = np.stack(
                [steps, *(np.bincount(owner, each, self.num_ranks) for each in sums)], 1
            )
            total += work
            clock = np.maximum(clock + work @ self.costs, clock.max())

        self.elapsed += float(clock.max())
        self.rounds.append(total)


def sections(args: argparse.Namespace, batch: int) -> dict[str, RolloutSection]:
    plain = RolloutSection(
        rollout_batch_size=batch,
        n_samples_per_prompt=args.samples,
        early_stop_every=args.every,
        generate_max_len=args.most,
    )
    tail = {
        f"tail_rounds_{factor}": replace(
            plain, rollout_schedule="tail_rounds", over_sampling=factor
        )
        for factor in args.over_sampling
    }

    return {
        "fifo": plain,
        "longest_first": replace(plain, rollout_schedule="longest_first"),
        **tail,
    }


def expected_lengths(lengths: np.ndarray, seed: int, visits: int = 1) -> np.ndarray:
    """Return the mean lengths of groups as an earlier visit tells them.

    They are off by a factor of log-normal noise. Without a visit all are the same.
    """
    if not visits:
        return np.full(len(lengths), lengths.mean())
    noise = np.random.default_rng(seed).standard_normal(len(lengths))
    return lengths.mean(1) * np.exp(0.3 * noise)


def simulate(args: argparse.Namespace, costs: Costs) -> list[dict]:
    rows = []
    for distribution, num_ranks in itertools.product(args.distributions, args.ranks):
        batch = args.prompts_per_rank * num_ranks
        lengths = draw_lengths(
            distribution,
            (args.steps * batch, args.samples),
            median=args.median,
            most=args.most,
            seed=1,
            correlation=args.correlation,
        )
        expected = expected_lengths(lengths, 2, args.visits)
        chosen = sections(args, batch)
        variants = {name: (section, {}) for name, section in chosen.items()}
        variants["longest_first_whole"] = chosen["longest_first"], {"divides": False}
        variants["longest_first_blind"] = chosen["longest_first"], {"predicts": False}
        run = partial(Simulation, num_ranks=num_ranks, slots=args.slots, costs=costs)
        times = {
            name: run(section, **limits).epoch(lengths, expected).elapsed
            for name, (section, limits) in variants.items()
        }
        order = np.argsort(lengths.max(1))
        times["known_lengths"] = (
            run(chosen["fifo"]).epoch(lengths[order], lengths[order].mean(1)).elapsed
        )
        rows.append(
            {
                "distribution": distribution,
                "ranks": num_ranks,
                "speedup": {name: round(times["fifo"] / each, 2) for name, each in times.items()},
            }
        )

    return rows


# -- the collector with vLLM


def measure(args: argparse.Namespace) -> tuple[Costs, dict]:
    """Return the fitted costs, and measured and simulated times on these ranks."""
    import torch.distributed as dist
    from vllm_ranks import Ranks, forced_rollout

    from lightrft.core.metrics import Metrics

    ranks = Ranks(args.most)
    batch = args.real_prompts
    lengths = draw_lengths(
        "log_normal",
        (args.real_steps * batch, args.samples),
        median=args.real_median,
        most=args.most,
        seed=1,
    )
    expected = expected_lengths(lengths, 2)
    chosen = sections(args, batch)

    spent = {}
    observed = []
    for _ in range(args.repeat):
        observed.append(ranks.observe(args.most))
        rollouts = {
            name: forced_rollout(ranks, section, lengths, expected)
            for name, section in chosen.items()
        }
        for number, (name, rollout) in itertools.product(range(args.real_steps), rollouts.items()):
            times = ranks.timed(partial(rollout.collect, number + 1, Metrics()))
            spent[name, number] = np.minimum(times, spent.get((name, number), np.inf))

    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(
        by_rank, {key: (len(times) - 1, times.sum()) for key, times in spent.items()}
    )
    costs = fit(observed)
    rows = rollouts["fifo"].scheduler.order.rows(0, len(lengths))

    # [training steps, ranks, 4] of work; [training steps, ranks, 2] of steps and milliseconds
    simulated = {}
    measured = {}
    for name, section in chosen.items():
        simulation = Simulation(section, num_ranks=len(by_rank), slots=args.slots, costs=costs)
        simulated[name] = np.array(simulation.epoch(lengths[rows], expected[rows]).rounds)
        measured[name] = np.array(
            [[each[name, number] for each in by_rank] for number in range(args.real_steps)]
        )

    total = {
        name: (each[..., 1].sum(), (simulated[name] @ costs).sum())
        for name, each in measured.items()
    }
    longest = {
        name: (each[..., 1].max(1).sum(), (simulated[name] @ costs).max(1).sum())
        for name, each in measured.items()
    }

    return costs, {
        "same_steps": {
            name: bool((each[..., 0] == simulated[name][..., 0]).all())
            for name, each in measured.items()
        },
        "measured_s": {name: round(spent / 1000, 2) for name, (spent, _) in longest.items()},
        "simulated_of_measured": {
            name: round(each / spent, 3) for name, (spent, each) in longest.items()
        },
        "simulated_of_measured_all_ranks": {
            name: round(each / spent, 3) for name, (spent, each) in total.items()
        },
        "speedup_measured": {
            name: round(longest["fifo"][0] / spent, 2) for name, (spent, _) in longest.items()
        },
        "speedup_simulated": {
            name: round(longest["fifo"][1] / each, 2) for name, (_, each) in longest.items()
        },
    }


def fit(observed: list[list[tuple[list[float], float]]]) -> Costs:
    """Fit costs to work and its milliseconds.

    Work is (steps, tokens, earlier tokens, requests), and the least time over all repetitions
    counts.
    """
    work = np.array([work for work, _ in observed[0]])
    times = np.array([[spent for _, spent in run] for run in observed]).min(0)
    expected = np.full(len(times), times.mean())
    # relative errors count: to what the fit expects, as those to noisy times would make it too low
    for _ in range(4):
        costs, *_ = np.linalg.lstsq(work / expected[:, None], times / expected, rcond=None)
        expected = work @ costs
    return tuple(costs.tolist())


def options(argv: list[str] | None = None) -> argparse.Namespace:
    flags = {
        "--ranks": [8, 64, 256, 1024],
        "--correlation": (0.0, "of the lengths of two responses to a prompt"),
        "--prompts_per_rank": 4,
        "--samples": 8,
        "--steps": (60, "steps in a pass over the data"),
        "--median": 1000.0,
        "--most": 16384,
        "--slots": (256, "responses that an engine decodes at once"),
        "--every": 32,
        "--over_sampling": [1.5, 2.0],
        "--real_prompts": 8,
        "--real_steps": 12,
        "--real_median": 64.0,
        "--real_most": 1024,
        "--real_every": 16,
        "--real_samples": 4,
        "--repeat": 4,
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument(
        "--step_ms",
        type=float,
        nargs=4,
        help="base, per_response, per_context, per_request; default: fitted",
    )
    parser.add_argument(
        "--distributions",
        nargs="+",
        default=["log_normal", *STORED],
        choices=["log_normal", *STORED],
    )

    parser.add_argument(
        "--visits",
        type=int,
        default=1,
        choices=[0, 1],
        help="0: expected lengths of all prompts are the same",
    )
    return parser.parse_args(argv)


def main() -> None:
    args = options()
    result = {}
    costs = args.step_ms
    if "RANK" in os.environ:
        real = argparse.Namespace(
            **vars(args)
            | {"samples": args.real_samples, "most": args.real_most, "every": args.real_every}
        )
        fitted, result["two_ranks"] = measure(real)
        result["fitted_step_ms"] = [float(f"{each:.3g}") for each in fitted]
        costs = costs or fitted

    if os.environ.get("RANK", "0") == "0":
        costs = tuple(costs or (10.0, 0.05, 0.0, 0.0))
        print(json.dumps({"step_ms": costs, **result, "simulated": simulate(args, costs)}))


if __name__ == "__main__":
    main()
