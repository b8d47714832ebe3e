"""One step of a run in one file: what it learned from, and the models before it.

A bundle is a zip file:

    bundle.json        run, step, ranks, versions, digests and metrics of the step, prompts' columns
    config.yaml        configuration of the run
    samples.jsonl      recorded samples of all replicas, in rank order, without logits
    model/             --pretrain, if it is a folder; critic/ and teacherN/ in the same way
    checkpoints/stepN  the checkpoint before the step; none for the first step
    code/N/            the user's files of code, such as those of --reward and --policy_loss
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightrft.app.run.digests import FILE, read_digests
from lightrft.app.run.run_folder import DESCRIPTION, checkpoints_of
from lightrft.config.command_line import load
from lightrft.config.errors import ConfigError
from lightrft.config.paths import code_files
from lightrft.config.references import (
    REWARD_MODELS,
    reward_model_terms,
    reward_terms,
    teacher_terms,
)
from lightrft.config.sections import Config, has_episodes, media_columns
from lightrft.data.prompts import load_prompts
from lightrft.extras.recorder.differences import metrics_of, read_recorded
from lightrft.models.load import load_tokenizer
from lightrft.strategy.checkpoint.manifest import checkpoints

CONTENT = "bundle.json"
CONFIG_FILE = "config.yaml"
SAMPLES_FILE = "samples.jsonl"
MODEL_FOLDERS = {"pretrain": "model", "critic_pretrain": "critic"}
"""Field with a model's folder -> folder of the bundle."""
TEACHER = "teacher"
OF_DESCRIPTION = ("run", "world_size", "strategy", "device", "versions", "machine", "total_steps")


def write_bundle(folder: Path, step: int, path: Path) -> Path:
    """Write the bundle of a step of the run in `folder`; return the path.

    Raises ConfigError for a run that has not kept what a bundle needs.
    """
    config, samples, checkpoint = _checked(folder, step)
    digests = read_digests(folder) if (folder / FILE).is_file() else {}
    description = json.loads((folder / DESCRIPTION).read_text())
    content = {name: description.get(name) for name in OF_DESCRIPTION} | {
        "step": step,
        "digests": digests.get(step, {}),
        "metrics": metrics_of(folder, step),
        "columns": _columns(config, samples),
    }

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(CONTENT, json.dumps(content, indent=2, default=str))
        file.write(folder / CONFIG_FILE, CONFIG_FILE)
        file.writestr(SAMPLES_FILE, "".join(json.dumps(row) + "\n" for row in samples))
        for source, name in _files(config, checkpoint):
            file.write(source, name)
    return path


def _checked(folder: Path, step: int) -> tuple[Config, list[dict[str, Any]], Path | None]:
    """Return the configuration, the samples of the step, and the checkpoint before it."""
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {CONFIG_FILE}")
    config = load(folder / CONFIG_FILE)
    if (
        media_columns(config.data)
        or has_episodes(config.environment)
        or config.data.pretrain_data
        or config.optim.draft_learning_rate
        or config.engine.router_replay  # recorded samples have no experts
    ):
        raise ConfigError(
            "a bundle holds a step on text without environments, --pretrain_data,"
            " --draft_learning_rate and --router_replay; fork the run instead: --fork_from and --at"
        )

    samples = read_recorded(folder, step)
    if samples is None:
        raise ConfigError(
            f"{folder} has no samples of step {step}: record them with --dump_rollouts"
        )
    if step == 1:
        return config, samples, None

    saved = {path.name: path for _, path in checkpoints(checkpoints_of(folder))}
    before = saved.get(f"step{step - 1}")
    if before is None:
        raise ConfigError(
            f"{folder} has no checkpoint of step {step - 1}, with the models before step {step}; it"
            f" has {', '.join(sorted(saved)) or 'none'} (--save_steps, --max_ckpt_num)"
        )
    return config, samples, before


def _columns(config: Config, samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the columns of the prompts of the step, by index."""
    prompts = load_prompts(config.data, load_tokenizer(config.model))
    by_tokens = {tuple(prompt.token_ids): prompt for prompt in prompts}

    found = {}
    for sample in samples:
        index = sample["prompt"]["index"]
        tokens = sample["prompt"]["token_ids"]
        prompt = prompts[index] if index < len(prompts) else None
        # The run may have left out rows that its reward cannot score.
        if prompt is None or list(prompt.token_ids) != tokens:
            prompt = by_tokens.get(tuple(tokens))
        if prompt is None:
            raise ConfigError(
                f"--prompt_data {config.data.prompt_data} has no prompt"
                f" {sample['prompt']['text']!r:.200} any more"
            )
        found[str(index)] = prompt.columns
    return found


def _files(config: Config, checkpoint: Path | None) -> Iterator[tuple[Path, str]]:
    folders = {name: getattr(config.model, field) for field, name in MODEL_FOLDERS.items()}
    teachers = teacher_terms(config.model.teacher_pretrain)
    folders |= {f"{TEACHER}{number}": path for number, (_, path) in enumerate(teachers)}
    if checkpoint is not None:
        folders[f"checkpoints/{checkpoint.name}"] = checkpoint
    for name, path in folders.items():
        source = Path(path or "").expanduser()
        if path and source.is_dir():
            for file in sorted(each for each in source.rglob("*") if each.is_file()):
                yield file, f"{name}/{file.relative_to(source)}"

    for file, path_in_bundle in _paths_of_code(config).items():
        yield Path(file), path_in_bundle


def _paths_of_code(config: Config) -> dict[str, str]:
    """Return the path in a bundle of each file of code, by the name that flags have for it."""
    files = dict.fromkeys(file for _, _, file in code_files(config))
    return {file: f"code/{number}/{Path(file).name}" for number, file in enumerate(files)}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that is unpacked into a folder."""

    folder: Path
    content: dict[str, Any]
    config: Config
    samples: list[dict[str, Any]]

    @classmethod
    def unpack(cls, path: Path, folder: Path) -> "Bundle":
        """Unpack a bundle; the configuration then names the files in `folder`.

        Raises ConfigError for a file that is no bundle.
        """
        try:
            with zipfile.ZipFile(path) as file:
                file.extractall(folder)
            content = json.loads((folder / CONTENT).read_text())
            lines = (folder / SAMPLES_FILE).read_text().splitlines()
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} is not a bundle of `lightrft bundle`: {error}") from error

        config = load(folder / CONFIG_FILE)
        for field, name in MODEL_FOLDERS.items():
            if (folder / name).is_dir():
                config.update({field: str(folder / name)})
        teachers = [
            (label, str(folder / copy) if (folder / copy).is_dir() else path)
            for number, (label, path) in enumerate(teacher_terms(config.model.teacher_pretrain))
            for copy in [f"{TEACHER}{number}"]
        ]
        written = (f"{label}={path}" if label else path for label, path in teachers)
        config.update({"teacher_pretrain": ",".join(written)})
        # Their scores are recorded, and not computed again. The labels have weights.
        for field in REWARD_MODELS:
            terms = [term for flag, term in reward_model_terms(config.model) if flag == field]
            config.update({field: [str(replace(term, name=str(folder))) for term in terms]})
        paths = _paths_of_code(config)
        moved = {
            (flag, name): name.replace(file, str(folder / paths[file]), 1)
            for flag, name, file in code_files(config)
        }
        names = [
            str(replace(term, name=moved.get(("reward", term.name), term.name)))
            for term in reward_terms(config.reward.reward)
        ]
        config.update({"reward": ",".join(names)})
        config.update({flag: name for (flag, _), name in moved.items() if flag != "reward"})

        return cls(folder, content, config, [*map(json.loads, lines)])
