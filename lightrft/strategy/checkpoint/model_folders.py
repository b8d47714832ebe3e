"""Models that are GGUF files or quantized folders.

Each is converted once, into a folder of a cache, and the program only knows that folder.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from loguru import logger

from lightrft.config.errors import ConfigError
from lightrft.config.references import GGUF, REWARD_MODELS, reward_model_terms, teacher_terms
from lightrft.config.resolve import convert_values
from lightrft.config.sections import Config
from lightrft.models.weight_files import cached_folder, hub_folder
from lightrft.strategy.checkpoint.atomic import CheckpointError
from lightrft.strategy.checkpoint.dequantize import convert, quantization
from lightrft.versions import EXTRAS, requirements, version_problems

FORMAT = 1
"""Version of what convert() writes: a change makes new folders."""
NEEDED = {"transformers": ">=5.19"} | EXTRAS["gguf"]
"""Versions that read GGUF files with the pre-tokenizers of their models."""
MODEL_FIELDS = ("pretrain", "critic_pretrain")


def name_folders(config: Config, *, local: bool = False) -> None:
    """Replace each GGUF file and quantized folder that a configuration names by a plain folder.

    With `local` the hub is not asked whether it has quantized weights. Raise ConfigError if there is
    no such file, or if it cannot be converted.
    """
    convert_values(config)
    folder_of = partial(converted_folder, local=local)
    model = config.model
    engine = config.engine
    for flag in MODEL_FIELDS:
        model.put(flag, folder_of(getattr(model, flag), f"--{flag}"))
    engine.put("draft_pretrain", folder_of(engine.draft_pretrain, "--draft_pretrain"))

    teachers = [
        f"{label}={folder}" if label else folder
        for label, path in teacher_terms(model.teacher_pretrain)
        for folder in [folder_of(path, "--teacher_pretrain")]
    ]
    model.put("teacher_pretrain", ",".join(teachers))

    terms = reward_model_terms(model)
    for flag in REWARD_MODELS:
        # An entry may say more than the name, and only the name changes.
        names = [term.name for source, term in terms if source == flag]
        pairs = zip(getattr(model, flag), names, strict=True)
        model.put(
            flag,
            [folder_of(name, f"--{flag}").join(entry.rsplit(name, 1)) for entry, name in pairs],
        )


def converted_folder(name: str, flag: str, *, local: bool = False) -> str:
    """Return the plain folder of a model in a GGUF file or a quantized folder, else `name` itself.

    The first process that needs the folder writes it into the cache of Hugging Face, HF_HOME, while
    the others wait. `flag` is for error messages.
    """
    try:
        if file := gguf_file(name):
            return str(_cached("gguf", file, file.stem, convert_gguf))

        if not _is_quantized(name, local=local):
            return name
        folder = Path(name).expanduser()
        local = folder if folder.is_dir() else Path(snapshot_download(name))
        return str(_cached("dequantized", local, folder.name, convert))
    except (ConfigError, CheckpointError, OSError) as error:
        raise ConfigError(f"{flag}: {error}") from error


def _is_quantized(name: str, *, local: bool) -> bool:
    """Return whether a folder or a hub name has quantized weights, by its configuration.

    With `local` the hub is not asked.
    """
    if not name:
        return False
    try:
        folder = cached_folder(name) if local else hub_folder(name)
    except (OSError, ValueError):  # loading the model says what is wrong
        return False
    return folder is not None and quantization(folder) is not None


def _cached(kind: str, source: Path, name: str, write: Callable[[Path, Path], Path]) -> Path:
    """Return the folder in the cache for a file, or for a folder with its files."""
    files = [source] if source.is_file() else sorted(filter(Path.is_file, source.iterdir()))
    key = "\n".join(f"{file.name} {_version(file)}" for file in files)
    digest = hashlib.sha256(f"{FORMAT} {key}".encode()).hexdigest()[:12]
    folder = Path(constants.HF_HOME, "lightrft", kind, digest, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            logger.info("converting {} to a plain Hugging Face folder, {}", source, folder)
            write(source, folder)
    return folder


def _version(file: Path) -> str:
    """Return what changes with a file: its content, or what the file system says of weights.

    Weights are too large to read at each start. No program can set the time of a file's last
    change, st_ctime.
    """
    if file.suffix in (".safetensors", GGUF):
        state = file.stat()
        return f"{state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def convert_gguf(file: Path, folder: Path) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder; see gguf.convert()."""
    if problems := version_problems(NEEDED):
        way_out = " ".join(f"'{requirement}'" for requirement in requirements(NEEDED))
        raise ConfigError(
            f"{file} cannot be read: {'; '.join(problems)}. To read GGUF files: pip install"
            f" {way_out}"
        )
    from lightrft.strategy.checkpoint.gguf import convert

    return convert(file, folder)


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that `name` stands for; None if there is none.

    It is the file itself, or the only one in a folder without config.json. Raise ConfigError for a
    file that does not exist, and for a folder with several.
    """
    path = Path(name).expanduser()
    # Not Path.is_dir(): that raises an error for a name that no file can have.
    is_folder = os.path.isdir(path)
    if path.suffix == GGUF and not is_folder:
        if not os.path.isfile(path):
            raise ConfigError(f"{name}: no such file")
        return path
    if not name or not is_folder or (path / "config.json").is_file():
        return None

    files = sorted(path.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise ConfigError(
            f"{name} has {len(files)} GGUF files, so name one of them:"
            f" {', '.join(file.name for file in files)}"
        )

    return files[0] if files else None
