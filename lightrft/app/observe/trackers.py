"""Send metrics to Weights & Biases, MLflow, SwanLab, Trackio and Comet, through accelerate.

The package of a tracker is imported when a run chooses it with --report_to.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from loguru import logger

from lightrft.app.observe.sinks import Settings, Sink, readable
from lightrft.config.errors import ConfigError
from lightrft.config.sections import ObserveSection

TRACKER_START_SECONDS = 300.0
CLOSE_SECONDS = 120.0
"""Time limits: for starting a tracker, and at the end for sending what it has not sent yet."""
SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
"""Environment variables with such names are secrets, and no tracker receives the values."""
SHORTEST_SECRET = 6
QUERY = re.compile(r"(https?://[^\s,?]+\?)[^\s,]+")
"""Pattern of an address with a query, because the query may contain a key."""
EXIT_STATES = {
    "finished": ("FINISHED", "success"),
    "interrupted": ("KILLED", "aborted"),
    "failed": ("FAILED", "crashed"),
}
"""Status of a run -> what MLflow and SwanLab call it."""


@dataclass(frozen=True, slots=True)
class Package:
    """Differences between the packages.

    `tracker` is a tracker of accelerate, and `tracker.tracker` is the package's own run.
    """

    options: Callable[[ObserveSection, Path, str | None], dict[str, Any]]
    """Takes the section, the run's folder and the id of the run to continue; returns the options of
    the start."""
    samples: Callable[[Any, list[dict[str, str]], int], None]
    run_id: Callable[[Any], str] = lambda run: run.id
    finish: Callable[[Any, str], None] = lambda tracker, status: tracker.finish()
    login_problem: Callable[[], str] = lambda: ""
    """Returns what is missing for a login; empty if there is one."""
    takes_changes: bool = True
    """False if the configuration of a run cannot be changed when it is resumed."""


class Tracker(Sink):
    """Sends metrics, samples and the configuration to one tracker, in a separate thread.

    Between the start and the end of the run, training never waits for the tracker. A resumed run
    continues the run whose id is in the folder. The first call that fails is reported; later ones
    are still attempted, and the run goes on. Secrets of the environment, and queries of addresses,
    become *** in everything that is sent at the start.
    """

    def __init__(self, name: str, folder: Path | str, section: ObserveSection):
        """Set up the tracker `name` of PACKAGES.

        The process group must exist, because accelerate would create one.
        """
        self._name = name
        self._folder = Path(folder)
        name_of_run = section.tracker_run_name or self._folder.name
        self._section = replace(section, tracker_run_name=name_of_run)
        self._package = PACKAGES[name]
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._failed = False

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        """Start the tracker and wait for it.

        Raises ConfigError if it cannot start, for example without a login.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        id_file = self._folder / f"{self._name}_run_id"
        run_id = id_file.read_text() if resume_step is not None and id_file.exists() else None
        threading.Thread(target=self._work, name=f"tracker {self._name}", daemon=True).start()

        # Only the start is awaited: a tracker that cannot start should end the run at once.
        opened = self._submit(partial(self._open, flat(config), run_id))
        try:
            id_file.write_text(opened.result(TRACKER_START_SECONDS))
        except Exception as error:
            self._calls.put(None)
            problem = f" cannot start: {describe(error)}"
            if isinstance(error, TimeoutError) and not opened.done():
                problem = f": no answer within {TRACKER_START_SECONDS:g} seconds"
            raise ConfigError(f"--report_to {self._name}{problem}") from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._attempt(lambda: self._tracker.log(metrics, step=step))

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        if rows := [{name: str(value) for name, value in row.items()} for row in readable(rows)]:
            self._attempt(lambda: self._package.samples(self._tracker, rows, step))

    def close(self, status: str) -> None:
        """End the tracker's run with this run's status, and wait at most CLOSE_SECONDS."""
        done = self._attempt(lambda: self._package.finish(self._tracker, status))
        self._calls.put(None)
        try:
            done.exception(CLOSE_SECONDS)
        except TimeoutError:
            self._report(TimeoutError(f"not everything was sent within {CLOSE_SECONDS:g} seconds"))

    def _open(self, config: dict[str, Any], run_id: str | None) -> str:
        """Open the tracker's run and return the id."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        share_process_group()
        section = self._section
        options = self._package.options(section, self._folder, run_id)
        with secrets_hidden_in_argv():
            self._tracker = LOGGER_TYPE_TO_CLASS[self._name](section.tracker_project, **options)
            self._tracker.main_process_only = False  # only rank 0 has trackers
            self._tracker.start()
        if run_id is None or self._package.takes_changes:
            self._tracker.store_init_configuration(config)
        return self._package.run_id(self._tracker.tracker)

    def _attempt(self, call: Callable[[], Any]) -> Future:
        future = self._submit(call)
        future.add_done_callback(lambda done: self._report(done.exception()))
        return future

    def _submit(self, call: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._calls.put((future, call))
        return future

    def _work(self) -> None:
        """Make the calls one after another in one thread: some packages keep state there."""
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a package without a login may end the process
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def _report(self, problem: BaseException | None) -> None:
        if problem is not None and not self._failed:
            self._failed = True
            logger.warning(
                f"--report_to {self._name}: {describe(problem)}; the run continues, and"
                " metrics.jsonl has every metric"
            )


def check_login(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that has no login, before a run loads anything."""
    for name in names:
        if name in PACKAGES and (problem := PACKAGES[name].login_problem()):
            raise ConfigError(f"--report_to {name} cannot start: {problem}")


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten sections, `{"train": {"seed": 1}}` to `{"train.seed": 1}`, and hide secrets."""
    flattened: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, bool | int | float | None)
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            flattened[prefix + name] = value if plain else hide_secrets(text)
    return flattened


def describe(problem: BaseException) -> str:
    """Return one line about an exception, without secrets."""
    return hide_secrets(" ".join(f"{type(problem).__name__}: {problem}".split()))


def hide_secrets(text: str) -> str:
    """Replace secrets of the environment, and the queries of addresses, by ***."""
    secrets = {
        value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name.upper()) and len(value) >= SHORTEST_SECRET
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return QUERY.sub(r"\1***", text)


@contextmanager
def secrets_hidden_in_argv() -> Iterator[None]:
    """Hide secrets in the arguments of the process, because trackers record them."""
    arguments = sys.argv
    sys.argv = [hide_secrets(argument) for argument in arguments]
    try:
        yield
    finally:
        sys.argv = arguments


def share_process_group() -> None:
    """Make accelerate's logger use the present process group.

    Accelerate may set torch's number of threads, so it is restored.
    """
    from accelerate import PartialState

    threads = torch.get_num_threads()
    PartialState(cpu=True)
    torch.set_num_threads(threads)


def _names(section: ObserveSection, organisation: str, run_id: str | None) -> dict[str, Any]:
    """Return the names of a run of wandb or swanlab, which call the organisation differently."""
    names = {"name": section.tracker_run_name, "group": section.tracker_group}
    resumed = {"id": run_id, "resume": "allow"} if run_id else {}
    return names | {organisation: section.tracker_org} | resumed


def _wandb(section: ObserveSection, folder: Path, run_id: str | None) -> dict[str, Any]:
    return _names(section, "entity", run_id) | {"dir": str(folder)}


def _trackio(section: ObserveSection, folder: Path, run_id: str | None) -> dict[str, Any]:
    resumed = {"name": run_id, "resume": "allow"} if run_id else {"name": section.tracker_run_name}
    return {"group": section.tracker_group, "embed": False, **resumed}


def _swanlab(section: ObserveSection, folder: Path, run_id: str | None) -> dict[str, Any]:
    return _names(section, "workspace", run_id) | {"log_dir": str(folder / "swanlog")}


def _mlflow(section: ObserveSection, folder: Path, run_id: str | None) -> dict[str, Any]:
    return {"run_name": section.tracker_run_name, "run_id": run_id}


def _comet(section: ObserveSection, folder: Path, run_id: str | None) -> dict[str, Any]:
    from comet_ml import ExperimentConfig

    names = ExperimentConfig(name=section.tracker_run_name, offline_directory=str(folder / "comet"))
    resumed = {"experiment_key": run_id, "mode": "get"} if run_id else {}
    return {"workspace": section.tracker_org, "experiment_config": names, **resumed}


def _wandb_samples(tracker: Any, rows: list[dict[str, str]], step: int) -> None:
    tracker.log_table("samples", **_table(rows), step=step)


def _table(rows: list[dict[str, str]]) -> dict[str, list]:
    columns = list(rows[0])
    return {"columns": columns, "data": [[row.get(name, "") for name in columns] for row in rows]}


def _trackio_samples(tracker: Any, rows: list[dict[str, str]], step: int) -> None:
    import trackio

    tracker.log({"samples": trackio.Table(**_table(rows))}, step=step)


def _mlflow_samples(tracker: Any, rows: list[dict[str, str]], step: int) -> None:
    import mlflow

    mlflow.log_text("".join(line + "\n" for line in _json_lines(rows)), f"samples/step{step}.jsonl")


def _swanlab_samples(tracker: Any, rows: list[dict[str, str]], step: int) -> None:
    tracker.tracker.log_text(key="samples", data=_json_lines(rows), step=step)


def _comet_samples(tracker: Any, rows: list[dict[str, str]], step: int) -> None:
    for line in _json_lines(rows):
        tracker.tracker.log_text(line, step=step)


def _json_lines(rows: list[dict[str, str]]) -> list[str]:
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def _wandb_login() -> str:
    """Look where the package looks for a key, without the network."""
    from requests.utils import get_netrc_auth  # it comes with wandb

    settings = [
        Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser() / "settings",
        Path("wandb/settings"),
    ]
    found = (
        os.environ.get("WANDB_MODE", "online") not in ("online", "run", "shared"),
        any(name in os.environ for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")),
        get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None,
        any("api_key" in file.read_text() for file in settings if file.is_file()),
    )
    if any(found):
        return ""
    return "there is no login: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"


def _finish_mlflow(tracker: Any, status: str) -> None:
    import mlflow

    mlflow.end_run(EXIT_STATES[status][0])


PACKAGES = {
    "wandb": Package(
        _wandb,
        _wandb_samples,
        finish=lambda tracker, status: tracker.tracker.finish(int(status != "finished")),
        login_problem=_wandb_login,
    ),
    "mlflow": Package(
        _mlflow, _mlflow_samples, lambda run: run.info.run_id, _finish_mlflow, takes_changes=False
    ),
    "swanlab": Package(
        _swanlab,
        _swanlab_samples,
        finish=lambda tracker, status: tracker.tracker.finish(EXIT_STATES[status][1]),
    ),
    "trackio": Package(_trackio, _trackio_samples, lambda run: run.name),
    "comet_ml": Package(_comet, _comet_samples, lambda run: run.get_key()),
}
"""Tracker's name in --report_to, the same as the package's -> how to use it."""
