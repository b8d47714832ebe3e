"""The public face of how a run is distributed; users subclass it, backends implement it.

Its verbs of models, device memory, the engine and checkpoints are in files of their own, one base class each.
"""

import os
import random
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from lightrft.backends import reduce
from lightrft.backends.config import Arguments, StrategyConfig, sequence_layout
from lightrft.checkpoint.hf_export import export, export_adapter
from lightrft.checkpoint.hf_parameters import unwrap
from lightrft.data.loader import Order
from lightrft.launch.heartbeat import MARGIN, Alone, Watchdog
from lightrft.launch.rendezvous import adopt_node_size, join_process_group
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import current_device, memory_in_use, peak_memory, select_device
from lightrft.parallel.mesh import Mesh, world_axis
from lightrft.strategy.checkpoint_verbs import CheckpointVerbs
from lightrft.strategy.compatible_names import CompatibleNames
from lightrft.strategy.dataloader import ResumableBatchSampler
from lightrft.versions import TENSOR_PARALLEL, untested_versions

GB = 1e9


class StrategyBase(CompatibleNames, CheckpointVerbs):
    """Verbs of distribution. All ranks call every verb together, in the same order, unless it says otherwise.

        strategy = get_strategy(args)
        strategy.setup_distributed()
        model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
        strategy.backward(loss, model, optimizer)
        norm = strategy.optimizer_step(optimizer, model, scheduler)
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int | None = None,
        train_batch_size: int = 1024,
        args: Arguments = None,
    ):
        super().__init__()
        self.seed, self.max_norm = seed, max_norm
        self.micro_train_batch_size, self.train_batch_size = micro_train_batch_size, train_batch_size
        self.config = StrategyConfig.from_args(args)
        self.device = current_device()
        self._mesh: Mesh | None = None
        self._owns_processes = False
        self._watchdog: Watchdog | Alone | None = None

    # -- processes

    def set_seed(self, seed: int) -> None:
        """Python, numpy, torch and its accelerator, equal on all ranks, so that parameters initialise equally.

        Models from prepare() nevertheless draw their dropout differently on each data rank.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None) -> None:
        """Bind the device, join or create the process group, form the mesh, seed.

        `num_gpu_per_node`, the same on all nodes, gives ranks their devices where the launcher does not (no LOCAL_RANK).
        ValueError for settings that cannot run, RuntimeError for an environment that no launcher made.
        """
        self.config.check()
        if self.config.deterministic:
            self._phases.begin_deterministic()
        timeout = timeout or timedelta(minutes=self.config.timeout_minutes)
        if num_gpu_per_node is not None:
            adopt_node_size(os.environ, num_gpu_per_node)
        self._owns_processes = join_process_group(select_device(), timeout, timedelta(minutes=self.config.arrival_minutes))
        self.device = current_device()
        self._watchdog = Watchdog.start(timeout, timedelta(minutes=self.config.phase_minutes))
        sizes = {"dp_replicate": self.config.dp_replicate, "sp": sequence_layout(self.config)[0], "tp": self.config.tp_size}
        self._mesh = Mesh.shared(self.device.type, **sizes, timeout=timeout + MARGIN)
        self.mesh.engine(self.config.engine_tp_size)
        self._check_batch_sizes()
        self._warn_of_versions()
        self.set_seed(self.seed)

    def close(self) -> None:
        """End the engine, and the process group if setup_distributed() made it. May be called at any time.

        A checkpoint that is being written is finished before; what fails then is said in the log.
        """
        self.close_checkpoints()
        self._phases.end_deterministic()
        self._mesh, self._models, self._optimizers = None, [], []
        self.close_engine()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._owns_processes:
            dist.destroy_process_group()
            self._owns_processes = False

    def announce(self, phase: str) -> None:
        """What this rank does from now on, empty for nothing in particular: named when a rank fails, dies or is late."""
        if self._watchdog is not None:
            self._watchdog.enter(phase)

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> None:
        """End the processes of all ranks with this cause, said briefly or with its traceback. Returns where there is one rank.

        What nobody catches does the same by itself.
        """
        if self._watchdog is not None:
            self._watchdog.fail(error, code=code, brief=brief)

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("this needs the mesh: call setup_distributed() first")
        return self._mesh

    @classmethod
    def get_rank(cls) -> int:
        """Return this process's rank, before the process group exists as the launcher says it, else 0."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))

    @classmethod
    def is_rank_0(cls) -> bool:
        return cls.get_rank() == 0

    @classmethod
    def print(cls, *message: object) -> None:
        """Log on rank 0 only."""
        if cls.is_rank_0():
            logger.opt(depth=1).info("{}", " ".join(str(part) for part in message))

    @classmethod
    def report_memory(cls, prefix: str = "") -> dict[str, float]:
        """Return GB of this rank's accelerator, or of the process on a CPU; rank 0 logs its own. No other rank is needed."""
        device = current_device()
        memory = {"memory/in_use_gb": memory_in_use(device) / GB, "memory/peak_gb": peak_memory(device) / GB}
        cls.print(f"{prefix} memory:".lstrip(), *(f"{name.split('/')[1]} {value:.2f}" for name, value in memory.items()))
        return memory

    # -- numbers of all ranks

    def all_reduce(self, data: Any, op: reduce.Op = "mean") -> Any:
        """A number, a tensor, or a flat dict of both, over all data ranks; same type, dtype and device back, as a new object.

        Ranks that share a replica of data hold the same and count once. A mean of whole numbers is a float. A dict travels in one
        collective and has the same keys and shapes on all ranks.
        """
        return reduce.all_reduce(data, op, self._data())

    def all_gather(self, data: Any) -> Any:
        """Tensors of all data ranks joined along the first dim, in order (0-dim ones too), numbers as a list, dicts by key.

        First dims may differ between ranks. For metrics and plans: everything passes through the host.
        """
        return reduce.all_gather(data, self._data())

    # -- data

    def setup_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list], Any] | None = None,
        drop_last: bool = True,
        sampler: Collection[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader:
        """Batches of `batch_size` rows **per data rank**, reshuffled every epoch.

        `consumed_samples` counts rows of all ranks since the start of training: the first iteration continues there. Rows
        arrive as a list, or as what `collate_fn` makes of it. Without drop_last the last list may be shorter, also empty,
        on some ranks, but all ranks have the same number of batches. A `sampler` of your own, alike on all ranks, gives the
        rows of an epoch in their order each time it is iterated, in place of `shuffle`; ranks divide them all the same.
        """
        batches = ResumableBatchSampler(
            dataset, batch_size, self.mesh.data, shuffle=shuffle, drop_last=drop_last, seed=self.seed,
            consumed_samples=consumed_samples, rows=sampler,
        )
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn or list, pin_memory=pin_memory)

    def data_order(self, num_rows: int) -> Order:
        """Return the order in which a run draws the rows of its data: pass after pass, each shuffled anew by the seed."""
        return Order(num_rows, self.seed)

    # -- checkpoints: save_ckpt, load_ckpt and finish_ckpt are in checkpoint_verbs.py

    def save_model(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path, dtype: torch.dtype | None = None
    ) -> Path:
        """A Hugging Face folder that from_pretrained loads; rank 0 writes the weight stream, never the model at once.

        dtype None: bfloat16 with --bf16, else float32. An earlier model in `folder` is replaced.
        """
        stream = self.full_params(model, dtype)
        return export(unwrap(model), stream, tokenizer, Path(folder), dtype or self.dtype, self._world())

    def save_adapter(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path) -> Path:
        """The adapters alone, in float32, as a folder that peft's PeftModel.from_pretrained puts on the model they belong to.

        ValueError for a model of which something else is trained. An earlier adapter in `folder` is replaced.
        """
        self.reload_model(model)
        stream = self.stream(model, torch.float32)
        return export_adapter(unwrap(model), stream, tokenizer, Path(folder), self._world())

    # -- inside

    def _world(self) -> Axis:
        return self._mesh.world if self._mesh else world_axis()

    def _data(self) -> Axis:
        return self._mesh.data if self._mesh else Axis("data", 1, 0, None)

    def _check_batch_sizes(self) -> None:
        micro, data = self.micro_train_batch_size, self.mesh.data.size
        if micro is not None and self.train_batch_size % (micro * data):
            raise ValueError(
                f"train_batch_size {self.train_batch_size} is not a multiple of "
                f"micro_train_batch_size {micro} x data-parallel size {data} = {micro * data}"
            )

    def _warn_of_versions(self) -> None:
        untested = untested_versions(TENSOR_PARALLEL) if self.mesh.tp.size > 1 else []
        if untested and self.is_rank_0():
            logger.warning("--tp_size is not tested with {}: compare first steps with --tp_size 1", ", ".join(untested))
