"""Runs of a search, each in its own folder and process, paused and continued by checkpoints."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from lightrft.app.observe.sinks import read_ends, read_rows
from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.values import read_object
from lightrft.extras.tools.forecast import FORECAST_STEPS, Forecast, Interval
from lightrft.extras.tune.space import DIRECTIONS, general_name, refusal

SHARES = (1 / 9, 1 / 3, 1.0)
"""Trials are compared after these shares of their steps."""
RECENT_ROWS = 10
"""Number of last rows over which a metric is averaged that is not measured on held-out data."""
LOOK = 0.05
"""Seconds between two looks at a run."""
LOG = "tune.log"
"""File in the folder of a run with all that it has printed since it was last started."""
LONGEST_REASON = 500
"""Number of characters of an error in the table."""
OF_LAUNCHERS = re.compile("(.+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.+")
"""Environment variables that tell a process about the others of its own run."""
ANYTHING = Interval(-math.inf, math.nan, math.inf)
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass
class Trial:
    """A combination of values, and how it has done so far."""

    number: int
    parameters: dict[str, Any]
    values: list[float] = field(default_factory=list)
    """The metric after each share of the steps."""
    steps: list[int] = field(default_factory=list)
    """The step of each value."""
    repeats: dict[int, float] = field(default_factory=dict)
    """Seed -> the metric at the end of the run with it."""
    tokens: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Why it ended early."""

    @property
    def whole(self) -> bool:
        """True if it has come to the end."""
        return len(self.values) == len(SHARES)

    @property
    def results(self) -> list[float]:
        """The last value of each seed, but the first one only if fewer than two others are there.

        The first seed has selected the trial, so its value is likely to be a lucky one.
        """
        repeats = [*self.repeats.values()]
        return repeats if len(repeats) > 1 else [*self.values[-1:], *repeats]


class RunRecord:
    """What a run's folder says about its course."""

    def __init__(self, folder: Path):
        self.folder = folder
        described = read_object(folder / "run.json")
        self.total: int | None = described.get("total_steps")
        self.finished = described.get("status") == "finished"
        self.rows = read_rows(folder / "metrics.jsonl")

    @property
    def tokens(self) -> int:
        names = ("rollout/tokens", "train/tokens")
        return int(sum(row.get(name) or 0 for row in self.rows for name in names))

    def measured(self, metric: str, share: float) -> tuple[int, float] | None:
        """Return the step at a share of all steps, and the metric there; None before that.

        It is a value of held-out data, or the mean of the last rows. A run that has ended early has
        its last value; NaN is a value that was not finite. Raises ConfigError if there is no value
        at the end, or after twice the steps.
        """
        if self.total is None:
            return None
        rows = [row for row in self.rows if metric in row]
        last = self.rows[-1]["step"] if self.rows else 0
        if not rows and (self.finished or last >= 2 * share * self.total):
            names = ", ".join(sorted({name for row in self.rows for name in row}))
            late = f"not logged until step {last} of {self.total}, but {names}"
            fits = f"--eval_steps {math.ceil(share * self.total)}"
            raise ConfigError(f"--metric {metric}: {late}; choose one of these, or add {fits}")
        places = [i for i, row in enumerate(rows) if row["step"] >= share * self.total]
        if not places and not self.finished:
            return None

        index = places[0] if places else len(rows) - 1
        first = index if metric.startswith("eval/") else max(0, index - RECENT_ROWS + 1)
        values = [row[metric] for row in rows[first : index + 1]]
        return rows[index]["step"], math.nan if None in values else fmean(values)

    def forecast(self, metric: str, until: int, sign: int) -> Interval:
        """Forecast the end from the rows up to a step, higher being better; anything if they are few.

        Held-out rewards of a policy are few, so those of its rollouts stand for them. `sign` is 1 if
        a lower metric is better, else -1.
        """
        is_reward = general_name(metric) in DIRECTIONS["train_ppo"]["higher"]
        if is_reward and any("rollout/reward" in row for row in self.rows):
            metric = "rollout/reward"
        rows = [row for row in self.rows if row["step"] <= until and row.get(metric) is not None]
        if len(rows) < FORECAST_STEPS or self.total is None:
            return ANYTHING
        last = round(len(rows) * self.total / rows[-1]["step"])
        return Forecast([-sign * row[metric] for row in rows]).at(last)


@dataclass
class Launcher:
    """Starts runs of one command, and pauses them."""

    command: str
    flags: Sequence[str]
    metric: str
    ranks: int
    devices: Sequence[str] = ()
    """Accelerators that runs side by side share out; none on a CPU."""
    deadline: float = math.inf
    """Monotonic time when runs are paused."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set to pause all runs at once."""

    def refuses(self, values: Mapping[str, Any]) -> bool:
        """Return True if no run can have the values."""
        return bool(refusal(values, self.flags, self.command, self.ranks))

    def advance(
        self, folder: Path, flags: Sequence[str], share: float, slot: int | None = None
    ) -> tuple[float, str]:
        """Train up to a share of the steps; return the seconds, and what ended the run otherwise.

        The run goes on from its checkpoint, and is left with one. `slot` is its place among runs
        that are side by side. Raises ConfigError for what the user can correct.
        """
        began = time.monotonic()
        if self._reached(folder, share):
            return 0.0, ""

        folder.mkdir(parents=True, exist_ok=True)
        asked = False
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                self._words(folder, flags),
                env=self._environment(slot),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal comes here alone
            )
        try:
            while process.poll() is None:
                ends = self.stopping.is_set() or time.monotonic() > self.deadline
                if not asked and (ends or (share < 1 and self._reached(folder, share))):
                    # The run writes a checkpoint after the step that it is in.
                    process.send_signal(signal.SIGTERM)
                    asked = True
                time.sleep(LOOK)
        except ConfigError:
            process.terminate()
            process.wait()
            raise

        seconds = time.monotonic() - began
        if asked or (process.returncode == 0 and self._reached(folder, share)):
            return seconds, ""
        reason = failure(folder / LOG)
        if process.returncode == USER_ERROR:
            raise ConfigError(f"{folder} could not run: {reason}")
        return seconds, reason or f"exit code {process.returncode}"

    def _words(self, folder: Path, flags: Sequence[str]) -> list[str]:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m"]
        return [
            *(sys.executable, "-m", *(launcher if self.ranks > 1 else []), "lightrft"),
            *(self.command, *self.flags, *flags, f"--save_path={folder}"),
            *("--load_checkpoint", "--max_ckpt_num=1"),
        ]

    def _environment(self, slot: int | None) -> dict[str, str]:
        """Return the environment of a run; one in a slot sees devices of its own."""
        kept = {name: text for name, text in os.environ.items() if not OF_LAUNCHERS.fullmatch(name)}
        if slot is None or not self.devices:
            return kept
        own = self.devices[slot * self.ranks : (slot + 1) * self.ranks]
        return kept | {VISIBLE_DEVICES: ",".join(own)}

    def _reached(self, folder: Path, share: float) -> bool:
        described = read_object(folder / "run.json")
        if described.get("status") != "finished":
            last = read_ends(folder / "metrics.jsonl", 1)[-1:]
            least = share * described.get("total_steps", math.inf)
            if share == 1 or not last or last[0]["step"] < least:
                return False
        return RunRecord(folder).measured(self.metric, share) is not None


def failure(file: Path) -> str:
    """Return the last error in a log, or its last line."""
    text = file.read_text(errors="replace").strip()
    _, error, message = text.rpartition(" ERROR ")
    found = message if error else text.rpartition("\n")[2]
    return textwrap.shorten(found, LONGEST_REASON, placeholder=" ...")


def visible_devices() -> list[str]:
    """Return the accelerators as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    import torch

    count = torch.accelerator.device_count()
    given = os.environ.get(VISIBLE_DEVICES)
    return [*(map(str, range(count)) if given is None else given.split(","))][:count]
