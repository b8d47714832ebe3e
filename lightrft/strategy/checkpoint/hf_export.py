"""Export a weight stream to a Hugging Face folder, and rehearse that before a run."""

import copy
import inspect
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from loguru import logger
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.dynamic_module_utils import (
    get_class_from_dynamic_module,
    get_relative_import_files,
)
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from lightrft.config.errors import ConfigError
from lightrft.models.four_bits.linear import dense_stream
from lightrft.models.lora import ADAPTER_CONFIG_FILE as ADAPTER_CONFIG
from lightrft.models.lora import adapted_layers, is_adapter, merge_adapters, save_adapter
from lightrft.models.parallel.collectives import Axis
from lightrft.models.qwen_omni import OTHER_PREFIXES, published_config, speaks
from lightrft.models.weight_files import WeightFiles, cached_folder
from lightrft.models.weight_sync.names import PublishedNames, transformers_class
from lightrft.models.weight_sync.stream import persistent_buffers
from lightrft.strategy.checkpoint import atomic
from lightrft.strategy.checkpoint.shard_writer import ShardWriter

MAX_SHARD_BYTES = 5 * 10**9
FOLDERS = {"additional_chat_templates"}
"""Folders inside of a model's folder: transformers writes a tokenizer's further templates there."""
LOADING_SETTINGS = ("is_local", "local_files_only")
"""Settings of a tokenizer that say how it was loaded; transformers would write them into the
folder.
"""
GENERATION_FILE = "generation_config.json"
PREDICTS_SEVERAL = ("mtp.",)
"""Names of layers that predict several tokens: transformers has none, but engines draft by them."""
COPIED_FILES = tuple(
    """processor_config.json preprocessor_config.json video_preprocessor_config.json
    chat_template.json spk_dict.pt""".split()
)
"""Files of processors, and the voices of Qwen2.5-Omni: training does not change them."""

Stream = Iterator[tuple[str, Tensor]]


def export(
    model: nn.Module,
    stream: Stream,
    tokenizer: Tokenizer | None,
    folder: Path,
    dtype: torch.dtype,
    world: Axis,
) -> Path:
    """Write a folder in the published format of the model's family.

    All ranks consume the stream; each writes some of the files. The folder is written atomically;
    raise CheckpointError if that fails.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "only a transformers model can be saved as a Hugging Face folder, not"
            f" {type(model).__name__}"
        )

    writer = ShardWriter(folder.with_name(folder.name + atomic.TEMPORARY), MAX_SHARD_BYTES, world)
    published = PublishedNames.of(model).rename(stream)

    def write_rest(temporary: Path) -> None:
        if world.rank == 0:
            writer.name_files()
            _write_rest(model, tokenizer, dtype, temporary)

    atomic.write_folder(
        folder,
        world,
        partial(_check_target, folder),
        partial(_write_weights, writer, published, _other_modules(model), dtype),
        write_rest,
    )

    return folder


def rehearse(
    model: nn.Module,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    world: Axis,
    *,
    trust_remote_code: bool,
) -> None:
    """Write all of a model's folder but the weights into a temporary folder, and read it back.

    A run finds out in the first seconds what would otherwise end it after the last step. All ranks
    call this. Raise ConfigError on all ranks if the folder cannot be written, or is read back as
    something else.
    """

    def attempt() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _write_rest(model, tokenizer, dtype, Path(folder))
            _read_back(Path(folder), tokenizer, trust_remote_code=trust_remote_code)

    try:
        atomic.run_on_first(
            world, f"{model.name_or_path} cannot be saved as a model after training", attempt
        )
    except atomic.CheckpointError as error:
        raise ConfigError(str(error)) from error


def end_generation_at(model: nn.Module, token_ids: Iterable[int]) -> None:
    """Add the tokens that end a run's responses to a model's generation_config.json.

    Other engines know no others: a base model that has learned the turns of a chat template would
    write on after them.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    end_ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if new := sorted(set(token_ids) - set(end_ids)):
        model.generation_config.eos_token_id = [*end_ids, *new]


def _read_back(folder: Path, tokenizer: Tokenizer | None, *, trust_remote_code: bool) -> None:
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    config = AutoConfig.from_pretrained(folder, **options)
    for reference in (getattr(config, "auto_map", None) or {}).values():
        get_class_from_dynamic_module(reference, folder, local_files_only=True)
    if (folder / GENERATION_FILE).is_file():
        GenerationConfig.from_pretrained(folder)

    if tokenizer is not None:
        found = AutoTokenizer.from_pretrained(folder, **options)
        for name in ("vocab_size", "eos_token_id", "pad_token_id", "chat_template"):
            before = getattr(tokenizer, name)
            after = getattr(found, name)
            if after != before:
                raise ValueError(
                    f"the tokenizer's {name} is {before!r}, but {after!r} when it is saved and"
                    " loaded"
                )


def export_whole(
    model: PreTrainedModel, tokenizer: Tokenizer | None, folder: Path, dtype: torch.dtype
) -> Path:
    """Export a model that is whole in this process, with merged adapters.

    No other process writes. Parameters are cast before they are merged, as in a run, so that they
    equal the weights of the engine.
    """

    def cast(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Stream:
        return ((name, parameter.detach().to(dtype)) for name, parameter in parameters)

    parameters = dense_stream(model, model.named_parameters(), dtype, cast)
    stream = merge_adapters(model, chain(parameters, persistent_buffers(model)))
    return export(model, stream, tokenizer, folder, dtype, Axis("export", 1, 0, None))


def export_adapter(
    model: nn.Module, stream: Stream, tokenizer: Tokenizer | None, folder: Path, world: Axis
) -> Path:
    """Write the adapters of the stream in peft's format.

    All ranks consume it; rank 0 writes atomically.
    """
    if not adapted_layers(model) or any(
        p.requires_grad and not is_adapter(name) for name, p in model.named_parameters()
    ):
        raise ValueError(
            f"{type(model).__name__} is not a model with trained adapters: use save_model() to"
            " save it"
        )

    def write(temporary: Path) -> None:
        adapters = {
            name: tensor.cpu() for name, tensor in stream if is_adapter(name) and world.rank == 0
        }
        if world.rank == 0:
            save_adapter(model, adapters, temporary)
            _write_beside(model, tokenizer, [], temporary)

    atomic.write_folder(folder, world, partial(_check_target, folder, mark=ADAPTER_CONFIG), write)
    return folder


def _write_weights(
    writer: ShardWriter, stream: Stream, unchanged: Stream, dtype: torch.dtype, _: Path
) -> None:
    for name, tensor in stream:  # including buffers, which arrive unconverted
        writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
    for name, tensor in unchanged:
        writer.add(name, tensor)
    writer.finish()


def _other_modules(model: PreTrainedModel) -> Stream:
    """Yield the weights in a model's folder that are not loaded, and so not trained.

    They are the voice of a Qwen2.5-Omni, and layers that predict several tokens. Raise ValueError
    if there is a voice, and the folder was removed, or has no safetensors files.
    """
    has_voice = speaks(model)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    if not has_voice and not any("mtp" in pattern for pattern in ignored):
        return

    folder = cached_folder(model.name_or_path)
    files = WeightFiles.of(folder) if folder else None
    if files is None:
        if not has_voice:
            logger.warning(
                f"{model.name_or_path} is not there any more: layers that predict several tokens"
                " (mtp.*) are not in the new folder"
            )
            return
        raise ValueError(
            f"{model.name_or_path} has no safetensors files, from which talker and token2wav are"
            " copied"
        )

    prefixes = OTHER_PREFIXES if has_voice else PREDICTS_SEVERAL
    for name in sorted(name for name in files.files if name.startswith(prefixes)):
        yield name, files.read(name, ())


def _write_rest(
    model: PreTrainedModel, tokenizer: Tokenizer | None, dtype: torch.dtype, temporary: Path
) -> None:
    """Write all but the weights: configuration, tokenizer, and files that stay the same."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.use_cache = True  # training disables it
    # a critic may come from a model with another head
    config.architectures = [transformers_class(model).__name__]
    config = published_config(model, config)
    code = _code_of(model, tokenizer)
    if code and getattr(config, "auto_map", None):
        # The code comes with the folder, whatever repository it was loaded from.
        config.auto_map = {
            auto: str(name).rpartition("--")[2] for auto, name in config.auto_map.items()
        }
    config.save_pretrained(temporary)
    _write_beside(model, tokenizer, [*_files_beside(model), *code], temporary)


def _write_beside(
    model: PreTrainedModel, tokenizer: Tokenizer | None, files: list[Path], temporary: Path
) -> None:
    """Write the settings of generation, the tokenizer and copies, and sync all files to disk."""
    if model.can_generate():
        # Published settings may contradict each other, such as a temperature beside greedy
        # decoding. save_pretrained() would refuse to write them.
        model.generation_config.to_json_file(temporary / GENERATION_FILE)
    if tokenizer is not None:
        for name in LOADING_SETTINGS:
            tokenizer.init_kwargs.pop(name, None)
        tokenizer.save_pretrained(temporary)
    for file in files:
        shutil.copy(file, temporary)

    for path in temporary.rglob("*"):
        atomic.sync(path)


def _code_of(model: PreTrainedModel, tokenizer: Tokenizer | None) -> list[Path]:
    """Return the Python files of classes that came with a model (--trust_remote_code).

    Files that these import from there are included. The folder may hold code of processors too, so
    all of the Python files are returned.
    """
    classes = [transformers_class(model), type(model.config), type(tokenizer)]
    came_along = f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."
    remote = [
        Path(inspect.getfile(kind)) for kind in classes if kind.__module__.startswith(came_along)
    ]
    files = [*remote, *(Path(file) for path in remote for file in get_relative_import_files(path))]
    if remote and Path(model.name_or_path).is_dir():
        files += Path(model.name_or_path).glob("*.py")
    return list({file.name: file for file in files}.values())


def _files_beside(model: PreTrainedModel) -> list[Path]:
    """Return the processor files in the model's folder, or in the hub's cache on this machine."""
    if Path(model.name_or_path).is_dir():
        return [path for name in COPIED_FILES if (path := Path(model.name_or_path, name)).is_file()]
    cached = []
    if model.name_or_path:
        cached = [try_to_load_from_cache(model.name_or_path, name) for name in COPIED_FILES]
    return [Path(path) for path in cached if isinstance(path, str)]


def _check_target(folder: Path, temporary: Path, mark: str = "config.json") -> None:
    """Raise ValueError if `folder` has contents other than an earlier model or adapter.

    They would be removed.
    """
    if folder.is_dir() and any(folder.iterdir()):
        others = {path.name for path in folder.iterdir() if path.is_dir()} - FOLDERS
        if others or not (folder / mark).is_file():
            raise ValueError(
                f"{folder} contains other files than a model; use a separate folder, such as"
                f" {folder / 'model'}"
            )
