"""A Hugging Face folder from a weight stream."""

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.parallel.collectives import Axis
from lightrft.strategy.atomic import sync_file, write_file, write_folder

MAX_SHARD_BYTES = 5 * 10**9
NAME, INDEX = "model.safetensors", "model.safetensors.index.json"

Stream = Iterator[tuple[str, Tensor]]


def export(
    model: nn.Module, stream: Stream, tokenizer: PreTrainedTokenizerBase | None, folder: Path, dtype: torch.dtype, world: Axis
) -> Path:
    """Rank 0 writes, all consume the stream. The folder appears whole or not at all (CheckpointError on all ranks)."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"only a transformers model becomes a Hugging Face folder, not {type(model).__name__}")
    write_folder(
        folder,
        world,
        partial(_check_target, folder),
        partial(_write_weights, model, stream, dtype, world.rank == 0),
        partial(_write_rest, model, tokenizer, dtype, world.rank == 0),
    )
    return folder


class ShardWriter:
    """Collects tensors into safetensors files of at most `max_bytes` (a larger tensor has one of its own)."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self.waiting: dict[str, Tensor] = {}
        self.waiting_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.waiting and self.waiting_bytes + tensor.nbytes > self.max_bytes:
            self.flush()
        self.waiting[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self) -> None:
        path = self.folder / f"{len(self.files)}.tmp"
        save_file(self.waiting, path, metadata={"format": "pt"})
        sync_file(path)
        self.files.append(list(self.waiting))
        self.waiting, self.waiting_bytes = {}, 0

    def finish(self) -> None:
        """Give the files their names, which say how many there are, and write the index if there is more than one."""
        if self.waiting:
            self.flush()
        count = len(self.files)
        final = [NAME] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(final):
            (self.folder / f"{number}.tmp").rename(self.folder / name)
        if count > 1:
            weight_map = {tensor: file for file, tensors in zip(final, self.files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_file(self.folder / INDEX, json.dumps(index, indent=2).encode())


def _write_weights(model: PreTrainedModel, stream: Stream, dtype: torch.dtype, writes: bool, part: Path) -> None:
    """A failed write must not end the stream, which other ranks take part in: it is raised at the end."""
    writer, failure = ShardWriter(part, MAX_SHARD_BYTES), None
    for name, tensor in stream:
        if writes and failure is None:
            try:
                writer.add(name, tensor)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    if writes:
        for name, buffer in _persistent_buffers(model):
            writer.add(name, buffer.to(dtype) if buffer.is_floating_point() else buffer)
        writer.finish()


def _write_rest(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype, writes: bool, part: Path
) -> None:
    if not writes:
        return
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.use_cache = True  # training switches it off
    config.architectures = config.architectures or [_architecture(model)]
    config.save_pretrained(part)
    if model.can_generate():
        model.generation_config.save_pretrained(part)
    if tokenizer is not None:
        tokenizer.save_pretrained(part)
    for path in part.iterdir():
        sync_file(path)


def _persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _architecture(model: PreTrainedModel) -> str:
    """The class that transformers knows; sharding put one of its own in front of it."""
    return next(cls.__name__ for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def _check_target(folder: Path, part: Path) -> None:
    """Replacing a folder removes what is in it: only an earlier model may be there."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "config.json").is_file() or any(path.is_dir() for path in folder.iterdir()):
            raise ValueError(f"{folder} holds something else than a model; give a folder of its own, such as {folder / 'model'}")
