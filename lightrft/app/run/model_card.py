"""Write the card of a trained model, README.md beside the weights, and upload it to the hub."""

import math
import os
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, constants, metadata_load
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from loguru import logger

from lightrft.app.observe.text import short
from lightrft.config.errors import ConfigError
from lightrft.config.references import data_sources
from lightrft.config.sections import Config, fields_read
from lightrft.config.tables import table

METHODS: dict[str, str] = table("commands")["methods"]
CARD_SETTINGS: list[str] = table("app/run/settings")["card"]
"""Settings that a card shows if the command reads them."""
ON_HUB = "abcdefghijklmnopqrstuvwxyz0123456789-_./"


def write_card(
    folder: Path, config: Config, *, steps: int, results: dict[str, float], version: str
) -> None:
    """Write the card of the model in `folder`; `results` has held-out numbers by name."""
    model = config.model
    base = model.pretrain if _is_hub_name(model.pretrain) else ""
    names = [source.name for source in data_sources(config.data.prompt_data)]
    data = list(filter(_is_hub_name, names))
    about: dict[str, Any] = {"library_name": "transformers", "tags": ["lightrft", config.command]}
    if config.command not in ("train_rm", "train_prm"):
        about["pipeline_tag"] = "text-generation"

    about |= {"base_model": base} if base else _of_card(model.pretrain)
    about |= {"datasets": data} if data else {}
    head = yaml.safe_dump(about, sort_keys=False).strip()
    origin = (
        f"Trained from `{_public(model.pretrain)}` by {METHODS[config.command]} with lightrft"
        f" {version}, in {steps:,} steps."
    )
    lines = ["---", head, "---", "", f"# {folder.resolve().parent.name}", "", origin, ""]
    lines += _table(("Setting", "Value"), _settings(config))
    if results:
        shown = {name: short(value) for name, value in results.items()}
        lines += _table(("Held-out", "Value"), shown)
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _of_card(folder: str) -> dict[str, Any]:
    """Return the base model and the licence that the card in a folder names.

    It is empty without a card that can be read.
    """
    try:
        card = metadata_load(Path(folder).expanduser() / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        # Somebody else has written the card, and no training depends on it.
        return {}
    return {name: card[name] for name in ("base_model", "license") if card.get(name)}


def held_out_results(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of the last evaluation among rows of metrics."""
    last = next(
        (row for row in reversed(rows) if any(name.startswith("eval/") for name in row)), {}
    )
    return {
        name.removeprefix("eval/"): value
        for name, value in last.items()
        if name.startswith("eval/") and isinstance(value, float | int) and math.isfinite(value)
    }


def check_hub(repository: str) -> None:
    """Raise ConfigError if nothing could be uploaded to a repository: before anything is loaded."""
    flag = f"--push_to_hub {repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{flag}: not the name of a repository, owner/name ({error})") from error

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{flag}: HF_HUB_OFFLINE is set, which forbids uploads")

    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            f"{flag}: there is no login: run `hf auth login`, or set HF_TOKEN"
        ) from error
    except Exception as error:  # each HTTP client has errors of its own
        raise ConfigError(
            f"{flag}: the hub does not accept the login: {_first_line(error)}"
        ) from error


def push(folder: Path, repository: str) -> None:
    """Upload a folder to a repository of the hub; a new one is private.

    A failure is a warning: the model is safe in its folder.
    """
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload the trained model"
        )
    except Exception as error:  # each HTTP client has errors of its own
        logger.warning(
            f"--push_to_hub {repository}: the upload failed ({_first_line(error)}); repeat it with"
            f" `hf upload {repository} {folder}`"
        )
        return

    logger.info("uploaded: {}", commit.repo_url)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_hub_name(name: str) -> bool:
    return (
        name.count("/") == 1
        and not os.path.exists(name)
        and not set(name.lower()) - set(ON_HUB)
        and name[0] not in "./"
    )


def _public(name: str) -> str:
    """Return a name without the folders of this machine."""
    return name if _is_hub_name(name) else Path(name).name


def _settings(config: Config) -> dict[str, str]:
    read = fields_read(config.command)
    values = config.values_of(name for name in CARD_SETTINGS if name in read)
    shown = {
        name: _public(str(value)) if name in ("pretrain", "prompt_data") else str(value)
        for name, value in values.items()
    }
    references = shown.get("reward", "").split(",")
    shown["reward"] = ",".join(reference.rpartition("/")[2] for reference in references)

    unset = ("", "0", "False")
    return {f"`--{name}`": f"`{value}`" for name, value in shown.items() if value not in unset}


def _table(head: tuple[str, str], rows: dict[str, str]) -> list[str]:
    first, *others = [f"| {name} | {value} |" for name, value in (head, *rows.items())]
    return [first, "|---|---|", *others, ""]
