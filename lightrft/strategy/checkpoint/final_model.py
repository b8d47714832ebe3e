"""Export Hugging Face folders from a run's checkpoint, or from a folder with an adapter."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
from loguru import logger
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.errors import ConfigError
from lightrft.config.sections import Config, DataSection, ModelSection
from lightrft.data.rendering.template import turn_end_ids
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import (
    head_names,
    load_model,
    load_reward_model,
    load_scorer,
    load_tokenizer,
)
from lightrft.models.lora import ADAPTER_CONFIG_FILE as ADAPTER_CONFIG
from lightrft.models.lora import ADAPTER_WEIGHTS_FILE as ADAPTER_WEIGHTS
from lightrft.models.lora import (
    base_model_of_adapter,
    freeze_parameters,
    is_adapter_folder,
    merge_adapter,
)
from lightrft.models.parallel.collectives import Axis
from lightrft.models.qwen_omni import load_generation_config
from lightrft.models.weight_files import weights_of
from lightrft.models.weight_sync.stream import unwrap
from lightrft.strategy.checkpoint import manager
from lightrft.strategy.checkpoint.atomic import CheckpointError, run_on_first
from lightrft.strategy.checkpoint.hf_export import end_generation_at, export_adapter, export_whole
from lightrft.strategy.checkpoint.manifest import MANIFEST, Manifest
from lightrft.strategy.checkpoint.model_state import ModelState, frozen_names

ONE_RANK = Axis("export", 1, 0, None)
CHECKPOINT_FOLDER = "checkpoints"
"""Folder of a run that contains the checkpoints, unless --ckpt_path is another one."""
MERGED = "merged_pretrain"
SOURCE = "merged_from.json"
"""A run's folder for the base model merged with an adapter, and the file in it that names both."""
EXPORTED = "exported_pretrain"
CHECKPOINT_SOURCE = "exported_from.json"
"""An evaluation's folder for the model of a checkpoint, and the file in it that names the
checkpoint.
"""


def export_checkpoint(
    path: Path,
    folder: Path,
    *,
    name: str = "actor",
    pretrain: str = "",
    trust_remote_code: bool = False,
    adapter_only: bool = False,
) -> Path:
    """Write one model of a checkpoint as a run writes it at the end.

    The checkpoint may be from any number of ranks and any strategy. `path` is a checkpoint, or a
    folder of them; then the newest complete one is used. Configuration, tokenizer and frozen
    parameters come from the run's --pretrain, or from `pretrain`. This process loads the whole
    model, in float32. Raise ConfigError (a ValueError) or CheckpointError (a RuntimeError) if
    something is missing or does not match.
    """
    newest = _newest_checkpoint(path)
    if newest is None:
        model = ""
        if (path / "model").is_dir():
            model = f"; the trained model of this run is {path / 'model'}"
        raise ConfigError(f"{path} is not a checkpoint of a run, and contains none{model}")

    manifest, path, state = newest
    identity = state["client"].get("identity") or {}
    if "settings" not in identity:
        raise ConfigError(f"{path} was not written by a run of lightrft, so its models are unknown")

    section, bf16 = _section(identity["settings"], pretrain, trust_remote_code)
    tokenizer = load_tokenizer(section)
    role = _role(name, section, tokenizer, identity["settings"])
    model = unwrap(role)
    _check_base(model.name_or_path, identity, name, frozen=bool(frozen_names(model)))
    # The checkpoint is read into the sharded state of one rank that has everything.
    model_state = ModelState(role, None, None, ONE_RANK, torch.device("cpu"))
    contents = manager.CheckpointState({name: model_state}, {}, ONE_RANK, model_state.device)
    manager.load(contents, path, manifest.world_size, strict=True, module_only=True)
    end_generation_at(model, _learned_ends(identity["settings"], tokenizer))

    if adapter_only:
        return export_adapter(model, model.named_parameters(), tokenizer, folder, ONE_RANK)
    return export_whole(model, tokenizer, folder, torch.bfloat16 if bf16 else torch.float32)


def export_merged(
    adapter: str, folder: Path, *, base: str = "", trust_remote_code: bool = False
) -> Path:
    """Write the base model of an adapter in peft's format, with the adapter merged, in float32.

    `base` replaces the base model that the adapter names. The tokenizer comes from the adapter's
    folder if it has one. Raise ConfigError if something is missing or does not match.
    """
    section = ModelSection(
        pretrain=base or base_model_of_adapter(adapter), trust_remote_code=trust_remote_code
    )
    try:
        model = load_model(section)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{adapter} contains an adapter whose base model cannot be loaded: {error}"
        ) from error

    merged = merge_adapter(model, adapter)
    merged.generation_config = load_generation_config(adapter) or merged.generation_config
    return export_whole(merged, _tokenizer(adapter, section), folder, torch.float32)


def with_merged_pretrain(config: Config, world: Axis) -> Config:
    """Return a configuration whose --pretrain is a whole model; all ranks call this.

    A --pretrain that contains only an adapter becomes --save_path/merged_pretrain. Rank 0 writes
    that folder unless it exists.
    """
    adapter = str(Path(config.model.pretrain).expanduser())
    if not is_adapter_folder(Path(adapter)):
        return config

    def source() -> dict[str, str | None]:
        base = base_model_of_adapter(adapter)
        return {"adapter": _digest(adapter), "base": base, "weights": weights_of(base)}

    def write(folder: Path) -> None:
        logger.info("merging the adapter {} into its base model, in {}", adapter, folder)
        export_merged(adapter, folder, trust_remote_code=config.model.trust_remote_code)

    return _with_written_pretrain(config, world, MERGED, SOURCE, source, write)


def with_model_of_run(config: Config, world: Axis) -> Config:
    """Return the configuration with a model as --pretrain, also for a run's folder or a checkpoint.

    All ranks call this. The model of a complete run is in the folder `model`. A checkpoint's model,
    or the newest one's of a run without a final model, is written by rank 0 to
    --save_path/exported_pretrain unless it is there.
    """
    path = Path(config.model.pretrain).expanduser()
    if not path.is_dir() or (path / "config.json").is_file() or is_adapter_folder(path):
        return config
    if (path / "model").is_dir():
        return replace(config, model=replace(config.model, pretrain=str(path / "model")))

    def newest() -> Path:
        checkpoint_of_run = _newest_checkpoint(path)
        if checkpoint_of_run is None:
            raise ConfigError(
                f"{path} is neither a model's folder, nor that of a run, nor a checkpoint: no"
                " config.json in it"
            )
        return checkpoint_of_run[1]

    def source() -> dict[str, str | None]:
        checkpoint = newest()
        digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
        return {"checkpoint": str(checkpoint.resolve()), "manifest": digest}

    def write(folder: Path) -> None:
        checkpoint = newest()
        logger.info("exporting the model of {} to {}", checkpoint, folder)
        export_checkpoint(checkpoint, folder, trust_remote_code=config.model.trust_remote_code)

    return _with_written_pretrain(config, world, EXPORTED, CHECKPOINT_SOURCE, source, write)


def _with_written_pretrain(
    config: Config,
    world: Axis,
    folder_name: str,
    source_name: str,
    source: Callable[[], dict[str, str | None]],
    write: Callable[[Path], None],
) -> Config:
    """Return the configuration with a folder of --save_path as --pretrain.

    Rank 0 writes it unless it has the same source.
    """
    folder = Path(config.train.save_path) / folder_name

    def write_once() -> None:
        record = folder / source_name
        identity = source()
        if not (record.is_file() and json.loads(record.read_text()) == identity):
            write(folder)
            record.write_text(json.dumps(identity, indent=2) + "\n")

    try:
        run_on_first(world, f"--pretrain {config.model.pretrain}", write_once)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return replace(config, model=replace(config.model, pretrain=str(folder)))


def _role(name: str, section: ModelSection, tokenizer: Tokenizer, settings: dict) -> Actor | Scorer:
    """Return the role of a checkpoint's model, as the run built it."""
    if name.startswith("reward_model"):
        heads = head_names(section, settings["reward_heads"])
        model = freeze_parameters(load_reward_model(section, heads, tokenizer), section)
        return Scorer(model, num_heads=len(heads), learn_scale=settings["learn_scale"])
    if name == "critic":
        flag = "critic_pretrain" if section.critic_pretrain else "pretrain"
        return Scorer(freeze_parameters(load_scorer(section, flag), section))
    if name == "draft":
        return Actor(load_model(section, "draft_pretrain", name=settings["draft_pretrain"]))
    return Actor(freeze_parameters(load_model(section), section))


def _newest_checkpoint(path: Path) -> tuple[Manifest, Path, dict] | None:
    """Return the manifest, the path and the state of a checkpoint; None without one.

    In a folder of checkpoints, or of a run, the newest complete one is taken.
    """
    path = path / CHECKPOINT_FOLDER if (path / CHECKPOINT_FOLDER).is_dir() else path
    tag = path.name if (path / MANIFEST).is_file() else None
    return manager.find(path.parent if tag else path, tag, ONE_RANK)


def _section(settings: dict, pretrain: str, trust_remote_code: bool) -> tuple[ModelSection, bool]:
    """Return the run's model section and its bf16.

    trust_remote_code comes from the caller, not from the checkpoint.
    """
    model = {
        field.name: settings[field.name] for field in fields(ModelSection) if field.name in settings
    }
    section = ModelSection(
        **model
        | {"trust_remote_code": trust_remote_code}
        | ({"pretrain": pretrain} if pretrain else {})
    )
    if is_adapter_folder(section.pretrain):
        section.pretrain = str(Path(settings["save_path"]) / MERGED)

    if not Path(section.pretrain).expanduser().is_dir() and section.pretrain.startswith(
        (".", "/", "~")
    ):
        raise ConfigError(
            f"the run's --pretrain {section.pretrain} does not exist: set --pretrain to its present"
            " location"
        )

    return section, bool(section.bf16)


def _learned_ends(settings: dict, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that ended the run's responses."""
    names = [field.name for field in fields(DataSection) if field.name in settings]
    section = DataSection(**{name: settings[name] for name in names})
    return turn_end_ids(section, tokenizer).union(settings.get("stop_token_ids", ()))


def _check_base(folder: str, identity: dict, name: str, *, frozen: bool) -> None:
    """Raise ConfigError if frozen parameters would come from a model other than the run's."""
    before = identity.get("weights", {}).get(name)
    now = weights_of(folder)
    if frozen and before and now and before != now:
        raise ConfigError(
            f"the weights of {folder} are not the frozen weights of the run: set --pretrain to its"
            " base model"
        )


def _tokenizer(adapter: str, section: ModelSection) -> Tokenizer:
    if (Path(adapter) / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=section.trust_remote_code)
    return load_tokenizer(section)


def _digest(adapter: str) -> str:
    """Return a hash of an adapter's configuration and weights."""
    hasher = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with open(Path(adapter) / name, "rb") as file:
            hasher.update(hashlib.file_digest(file, "sha256").digest())
    return hasher.hexdigest()[:16]
