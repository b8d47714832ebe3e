"""Runs from Python: one call is a whole run, as on the command line, and takes objects.

import lightrft

run = lightrft.train_ppo(model="some/model", prompt_data=rows, reward=my_reward, max_steps=20)
run.history[-1]["rollout/reward"], run.model_path, run.evaluate()["accuracy"]
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from loguru import logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.app.observe.sinks import read_rows
from lightrft.app.run.logs import log_unless_set_up
from lightrft.app.trainer.objects import model_folder, with_names
from lightrft.config.command_line import load
from lightrft.config.errors import ConfigError
from lightrft.config.extras import extra, installed
from lightrft.config.paths import check_paths
from lightrft.config.sections import Config, fields_read

ConfigOrFile = Config | str | Path | None
Model = str | Path | PreTrainedModel
Rows = str | Path | Iterable[Any]
Reward = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]


class TrainedRun:
    """A run that has ended: metrics and a model, ready for evaluation."""

    def __init__(self, command: str, config: Config, done: int):
        self.command = command
        self.config = config
        self.done = done
        """How many steps the model has learned from."""
        self.folder = Path(config.train.save_path)
        """Folder of the run, with metrics, samples, report and model."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the metrics of each reported step, including those before a resumption."""
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def model_path(self) -> Path:
        """Return the folder of the trained model, for from_pretrained() and engines."""
        return self.folder / "model"

    def evaluate(self, config: ConfigOrFile = None, **values: Any) -> dict[str, float]:
        """Score the trained model on held-out prompts; return the numbers of evaluation.json.

        Data, engine and rewards are the same as in the run. A configuration and `values` replace
        them: `run.evaluate(eval_data=rows, eval_n_samples=8)`. Raises ConfigError for a reward
        model, because it generates no responses.
        """
        if self.command in ("train_rm", "train_prm"):
            raise ConfigError(
                f"a model of {self.command} generates no responses: its evaluation is in history,"
                " as eval/*"
            )

        read = fields_read("evaluate")
        # Only values that the user wrote are handed on; evaluation has defaults of its own.
        of_run = self.config.values_of(self.config.written & read)
        where = {"pretrain": str(self.model_path), "save_path": str(self.folder / "evaluation")}
        base = _configuration(config, of_run | where)

        return evaluate(base, **values)

    def __repr__(self) -> str:
        return f"<{self.command}: {self.done} steps, model in {self.model_path}>"


def train_ppo(
    config: ConfigOrFile = None,
    *,
    model: Model | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompt_data: Rows | None = None,
    reward: Reward | None = None,
    **values: Any,
) -> TrainedRun:
    """Train a policy by PPO, GRPO or a relative of these.

    `model` is a folder, a hub name, or a model of transformers; the run trains a copy of it.
    `tokenizer` replaces the model's tokenizer. `prompt_data` is a file, a hub name, a Dataset, or a
    list of rows, and so are the other data. `reward` is a name or a function, or a list of them; a
    function that is defined inside another one is called in this process.

    The arguments of TRL's trainers are taken too: train_dataset, reward_funcs, a GRPOConfig as args,
    a LoraConfig as peft_config.

    `config` is a YAML file or a Config. `values` are flags by name and take precedence:
    `max_steps=20`. Under torchrun all processes make the same call; without a launcher the run has
    one process. Raises ConfigError for what cannot run.
    """
    named = {"model": model, "tokenizer": tokenizer, "prompt_data": prompt_data, "reward": reward}
    return _train("train_ppo", config, _set(named) | values)


def train_sft(config: ConfigOrFile = None, **values: Any) -> TrainedRun:
    """Fine-tune a model on the answers of a data set; see train_ppo()."""
    return _train("train_sft", config, values)


def train_rm(config: ConfigOrFile = None, **values: Any) -> TrainedRun:
    """Train a reward model on pairs of answers; see train_ppo()."""
    return _train("train_rm", config, values)


def train_prm(config: ConfigOrFile = None, **values: Any) -> TrainedRun:
    """Train a process reward model on answers whose steps are judged; see train_ppo()."""
    return _train("train_prm", config, values)


def train_dpo(config: ConfigOrFile = None, **values: Any) -> TrainedRun:
    """Train a policy on pairs of answers by direct preference optimisation; see train_ppo()."""
    return _train("train_dpo", config, values)


def train_kto(config: ConfigOrFile = None, **values: Any) -> TrainedRun:
    """Train a policy on single answers that are good or bad (KTO); see train_ppo()."""
    return _train("train_kto", config, values)


def evaluate(
    config: ConfigOrFile = None,
    *,
    model: Model | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_data: Rows | None = None,
    reward: Reward | None = None,
    **values: Any,
) -> dict[str, float]:
    """Score a model on held-out prompts; return the numbers of evaluation.json.

    The arguments are as for train_ppo().
    """
    named_values = {
        "model": model,
        "tokenizer": tokenizer,
        "eval_data": eval_data,
        "reward": reward,
    }
    with model_folder(_set(named_values) | values) as named:
        return _run("evaluate", _configuration(config, named))


def _train(command: str, config: ConfigOrFile, values: dict[str, Any]) -> TrainedRun:
    notices: list[str] = []
    if installed():
        values, notices = extra("objects of TRL").taken(command, values)
    with model_folder(values) as named:
        resolved = _configuration(config, named)
        resolved.notices += notices
        trainer = _run(command, resolved)
    return TrainedRun(command, resolved, trainer.done if trainer else 0)


def _run(command: str, config: Config) -> Any:
    log_unless_set_up()
    check_paths(config, command)
    # What runs need is imported only now, so that a mistake in the values is reported at once.
    from lightrft.app.run.interruption import Interrupted
    from lightrft.app.trainer.run import run

    try:
        return run(command, config)
    except (Interrupted, KeyboardInterrupt) as error:
        if "ps1" in vars(sys):  # a notebook or a prompt goes on
            raise
        logger.error(str(error) or "interrupted by SIGINT")
        raise SystemExit(error.exit_code if isinstance(error, Interrupted) else 130) from None


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _configuration(config: ConfigOrFile, values: dict[str, Any]) -> Config:
    """Set `values` in a Config, in one read from a YAML file, or in an empty one."""
    if not isinstance(config, Config | str | Path | None):
        raise ConfigError(
            f"config is a YAML file or a Config, not {type(config).__name__}: pass values by name,"
            " as model=... or **values"
        )
    config = config if isinstance(config, Config) else Config() if config is None else load(config)
    config.update(with_names(values))
    return config
