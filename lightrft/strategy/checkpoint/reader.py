"""Read the tensors of a checkpoint without letting its files run code.

torch's FileSystemReader and DefaultLoadPlanner unpickle the index (`.metadata`) and plain values
(such as betas) without any restriction. Here the index may contain only the classes below, and
values are read with `weights_only`.
"""

import pickle
from pathlib import PurePath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX_CLASSES = (
    *(_MEM_FORMAT_ENCODING, BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex),
    *(StorageMeta, TensorProperties, TensorStorageMetadata, _StorageInfo, torch.Size),
)


def _memory_format(owner: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Stand in for getattr(): Python 3.11.0 to 3.11.3 pickle members of an enum with it.

    Raise UnpicklingError for anything else.
    """
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(
            f"its index asks for {name} of {owner!r}, which could execute code; it is not loaded"
        )
    return _MEM_FORMAT_ENCODING[name]


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _memory_format,
    **{(each.__module__, each.__qualname__): each for each in INDEX_CLASSES},
    # "torch.strided" -> torch.strided
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
"""Module and name in the pickled index -> the object that it is resolved to."""


class CheckpointReader(FileSystemReader):
    """Reader of torch.distributed.checkpoint without its unrestricted pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raise UnpicklingError for other classes in it, or for files outside of the checkpoint's
        folder.
        """
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(
                f"its index is a {type(metadata).__name__}, not the metadata of a checkpoint"
            )

        # A path such as ../../secret would be read like any other.
        for location in metadata.storage_data.values():
            if PurePath(location.relative_path).name != location.relative_path:
                raise pickle.UnpicklingError(
                    f"its index names a file outside of it: {location.relative_path}"
                )

        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"its index names {module}.{name}, which could execute code; it is not loaded"
        )
