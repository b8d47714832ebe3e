"""Write the safetensors files of a model from several ranks.

Each rank keeps the tensors of one file at most in memory.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lightrft.models.parallel.collectives import Axis
from lightrft.models.weight_files import INDEX, WEIGHTS_FILE
from lightrft.strategy.checkpoint.atomic import naming, sync, write_file


class ShardWriter:
    """Writer of files with at most `max_bytes` of tensors; a larger tensor has a file of its own.

    All ranks add the same tensors in the same order, and write the files in turn.
    """

    def __init__(self, folder: Path, max_bytes: int, world: Axis):
        self.folder = folder
        self.max_bytes = max_bytes
        self.world = world
        self.files: list[list[str]] = []
        """Names of the tensors in each file."""
        self.num_bytes = self.total_bytes = 0
        self._tensors: dict[str, Tensor] = {}
        """Contents of the last file, on the rank that writes it."""
        self._failure: Exception | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor.

        An error is kept for finish(): other ranks take part in the stream, so it must not end here.
        """
        if not self.files or self.num_bytes + tensor.nbytes > self.max_bytes:
            self._write()
            self.files.append([])
            self.num_bytes = 0

        self.files[-1].append(name)
        self.num_bytes = self.num_bytes + tensor.nbytes
        self.total_bytes = self.total_bytes + tensor.nbytes

        if (len(self.files) - 1) % self.world.size == self.world.rank and self._failure is None:
            with self._kept():
                self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def finish(self) -> None:
        """Write the last file, and raise the first error of this rank, if there was one."""
        self._write()
        if self._failure is not None:
            raise self._failure

    def name_files(self) -> None:
        """Rename the files to the final names, and write the index if there are several.

        The names contain the number of files, so one rank calls this after all ranks have finished.
        """
        count = len(self.files)
        numbers = range(1, count + 1)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in numbers]
        if count == 1:
            names = [WEIGHTS_FILE]
        for number, name in enumerate(names):
            self._path(number).rename(self.folder / name)

        if count > 1:
            weight_map = {
                tensor: name
                for name, tensors in zip(names, self.files, strict=True)
                for tensor in tensors
            }
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_file(self.folder / INDEX, json.dumps(index, indent=2).encode())

    def _write(self) -> None:
        tensors = self._tensors
        self._tensors = {}
        if tensors and self._failure is None:
            path = self._path(len(self.files) - 1)
            with self._kept():
                save_file(tensors, path, metadata={"format": "pt"})
                sync(path)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.tmp"

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep a failure until finish(), because the other ranks go on."""
        try:
            with naming(self.folder):
                yield
        except Exception as error:
            self._failure = self._failure or error
