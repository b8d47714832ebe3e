"""Public interface of a strategy, which distributes a run; users subclass it, backends implement it.

The verbs of models, device memory, the engine and checkpoints are in files of their own, with one base class each.
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
    """Verbs of distribution. All ranks call every verb together, in the same order, unless its docstring states otherwise.

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
        """Seed Python, numpy, torch and its accelerator equally on all ranks, so that parameters are initialised equally.

        Prepared models nevertheless draw different dropout masks on each data rank.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None) -> None:
        """Bind the device, join or create the process group, build the mesh, and seed.

        `num_gpu_per_node`, the same on all nodes, assigns devices to ranks if the launcher does not (no LOCAL_RANK).
        Raises ValueError for settings that cannot run, and RuntimeError for an environment that no launcher has set up.
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
        """Close the engine, and the process group if setup_distributed() made it. May be called at any time.

        A checkpoint that is being written is finished first; a failure of that is logged.
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
        """Set the activity of this rank, which is reported if a rank fails, dies or is late; empty for none in particular."""
        if self._watchdog is not None:
            self._watchdog.enter(phase)

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> None:
        """End the processes of all ranks with this cause, reported briefly or with its traceback. Returns if there is one rank.

        An uncaught exception does the same automatically.
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
        """Return this process's rank; before the process group exists, the launcher's RANK, or 0."""
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
        """Return memory in use and peak memory in GB of this rank's accelerator, or of the process on a CPU.

        Rank 0 logs its own. Other ranks need not call it.
        """
        device = current_device()
        memory = {"memory/in_use_gb": memory_in_use(device) / GB, "memory/peak_gb": peak_memory(device) / GB}
        cls.print(f"{prefix} memory:".lstrip(), *(f"{name.split('/')[1]} {value:.2f}" for name, value in memory.items()))
        return memory

    # -- collectives

    def all_reduce(self, data: Any, op: reduce.Op = "mean") -> Any:
        """Reduce a number, a tensor, or a flat dict of both over all data ranks; return a new object of equal type and device.

        The dtype is kept too, but the mean of integers is a float. Ranks of one data replica hold the same values and count once.
        A dict is reduced in one collective and must have the same keys and shapes on all ranks.
        """
        return reduce.all_reduce(data, op, self._data())

    def all_gather(self, data: Any) -> Any:
        """Gather from all data ranks, in order: concatenate tensors along the first dim (0-dim too), list numbers, dicts by key.

        First dims may differ between ranks. Intended for metrics and plans: everything is sent through the host.
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
        """Build a data loader with batches of `batch_size` rows **per data rank**, reshuffled every epoch.

        `consumed_samples` counts rows of all ranks since the start of training: the first iteration continues there. A batch is
        a list of rows, or the result of `collate_fn` on it. Without drop_last the last list may be shorter, or empty, on some
        ranks, but all ranks have the same number of batches. A custom `sampler`, identical on all ranks, replaces `shuffle`: each
        time it is iterated it yields the row indices of an epoch in order, which are then divided among the ranks.
        """
        batches = ResumableBatchSampler(
            dataset, batch_size, self.mesh.data, shuffle=shuffle, drop_last=drop_last, seed=self.seed,
            consumed_samples=consumed_samples, rows=sampler,
        )
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn or list, pin_memory=pin_memory)

    def data_order(self, num_rows: int) -> Order:
        """Return the order in which a run draws the rows of its data: epoch after epoch, each reshuffled by the seed."""
        return Order(num_rows, self.seed)

    # -- checkpoints: save_ckpt, load_ckpt and finish_ckpt are in checkpoint_verbs.py

    def save_model(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path, dtype: torch.dtype | None = None
    ) -> Path:
        """Write a Hugging Face folder that from_pretrained can load. Ranks write the stream in turn; none holds the whole model.

        dtype None: bfloat16 with --bf16, else float32. An existing model in `folder` is replaced.
        """
        stream = self.full_params(model, dtype)
        return export(unwrap(model), stream, tokenizer, Path(folder), dtype or self.dtype, self._world())

    def save_adapter(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path) -> Path:
        """Write only the adapters, in float32, as a folder that peft's PeftModel.from_pretrained loads onto their base model.

        Raises ValueError if other parameters of the model are trained too. An existing adapter in `folder` is replaced.
        """
        self.reload_model(model)
        stream = self.stream(model, torch.float32)
        return export_adapter(unwrap(model), stream, tokenizer, Path(folder), self._world())

    # -- internals

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
