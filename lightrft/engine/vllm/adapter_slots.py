"""Adapters of the policy in vLLM's slots, loaded from memory."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry, supports_lora

from lightrft.engine.base import EngineError, EngineSetup
from lightrft.engine.vllm.arguments import RANKS
from lightrft.models.weight_sync.adapters import Adapters, names_of
from lightrft.models.weight_sync.fused_layout import FUSED_LAYERS
from lightrft.models.weight_sync.names import PublishedNames
from lightrft.models.weight_sync.verify import Fingerprints

KNOWN_LAYERS = {"o_proj", "down_proj", *(name for names in FUSED_LAYERS.values() for name in names)}
"""Names of layers whose slots are known: attention and a gated MLP."""


def slots_problem(
    setup: EngineSetup, names: PublishedNames, architectures: list[str], media: Collection[str]
) -> str | None:
    """Return why vLLM cannot hold the adapters of `setup` in slots, or None."""
    registered = [
        ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models
    ]
    section = setup.section
    discards = section.engine_sleep_level == 2 and "engine_sleep_level" in section.written
    others = sorted({layer.rpartition(".")[2] for layer in setup.adapters.layers} - KNOWN_LAYERS)

    problems = {
        "the model reads more than text": bool(media),
        f"--speculative {section.speculative} drafts without adapters": (
            section.speculative != "none"
        ),
        "--engine_sleep_level 2 discards memory on an accelerator that vLLM fills only once": (
            discards and section.enable_engine_sleep and setup.device.type != "cpu"
        ),
        f"the rank {setup.adapters.rank} is above {RANKS[-1]}": setup.adapters.rank > RANKS[-1],
        f"where vLLM has the layers {', '.join(others)} is not known": bool(others),
        f"vLLM supports no adapters of {', '.join(architectures)}": not any(
            supports_lora(model.load_model_cls()) for model in registered
        ),
    }
    return next((problem for problem, holds in problems.items() if holds), None)


@dataclass(frozen=True, slots=True)
class _Address:
    """Slots of one layer of the transformers model: a slice of a layer of vLLM."""

    layer: BaseLinearLayerWithLoRA
    index: int


class AdapterSlots:
    """The slots of all layers, with the adapters of one policy for each load.

    A policy keeps the slot as long as a request runs with it. Names and ids are never used twice,
    so vLLM's prefix cache shares nothing between policies.
    """

    def __init__(self, manager: Any, adapters: Adapters, names: PublishedNames):
        """Find the layers in `manager`, vLLM's LoRAModelManager."""
        self.manager = manager
        self.adapters = adapters
        self.newest: LoRARequest | None = None
        """What requests of the newest policy carry."""
        self._num_loads = 0
        self._modules: dict[str, str] = {}
        """Layer of the transformers model -> vLLM's name of it before fusing."""
        self._addresses: dict[str, _Address] = {}
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        # The mapper of some models also names the fused layers, and slots go by what these combine.
        mapper = mapper and mapper.get_rename_mapper()
        for layer in adapters.layers:
            published = names.renamed[f"{layer}.weight"].removesuffix(".weight")
            self._modules[layer] = name = mapper.map_name(published) if mapper else published
            self._addresses[layer] = self._find(name)

    def _find(self, name: str) -> _Address:
        if name in self.manager.modules:
            return _Address(self.manager.modules[name], 0)
        for fused, packed in self.manager.packed_modules.items():
            if name in packed and fused in self.manager.modules:
                return _Address(self.manager.modules[fused], packed.index(name))
        raise ValueError(f"vLLM has no slot for the adapter of {name}: use --lora_sync merged")

    def load(self, tensors: Mapping[str, Tensor], running: set[int]) -> None:
        """Load adapters of a new policy; `running` are ids of policies that requests still use.

        Raises EngineError if those fill all slots.
        """
        for number in set(self.manager.list_adapters()) - running:
            self.manager.remove_adapter(number)
        if len(self.manager) == self.manager.capacity:
            raise EngineError(
                f"requests of {len(self.manager)} earlier policies still run, and there are as"
                " many slots for adapters (--max_staleness + 1): use --weight_update wait"
            )

        self._num_loads += 1
        policy = LoRAModel(
            self._num_loads,
            self.adapters.rank,
            {self._modules[layer]: self._weights(layer, tensors) for layer in self._modules},
        )
        self.manager.add_adapter(policy)
        self.manager.activate_adapter(policy.id)
        self.newest = LoRARequest(f"policy {policy.id}", policy.id, lora_path="in memory")

    def _weights(self, layer: str, tensors: Mapping[str, Tensor]) -> LoRALayerWeights:
        # vLLM keeps and changes what it gets, and the trainer may have streamed its own memory.
        a, b = (tensors[name].detach().clone() for name in names_of(layer))
        return LoRALayerWeights(self._modules[layer], len(a), len(a), a, b)

    def tensors(self) -> Iterator[tuple[str, Tensor, int, int]]:
        """Yield (peft's name, shard, row, column) of the newest adapters in this rank's slots.

        Row and column are where the shard starts in the full tensor.
        """
        assert self.newest is not None
        slot = self.manager.lora_index_to_id.index(self.newest.lora_int_id)
        for layer, address in self._addresses.items():
            a, b = names_of(layer)
            rank, columns = self.adapters.shapes[a]
            wrapper = address.layer
            column = 0
            if isinstance(wrapper, RowParallelLinearWithLoRA):
                column = wrapper.tp_rank * wrapper.input_size
            local_a = wrapper.lora_a_stacked[address.index][slot, 0, :rank]
            yield a, local_a[:, : columns - column], 0, column

            local_b = wrapper.lora_b_stacked[address.index][slot, 0, :, :rank]
            row = 0
            if isinstance(wrapper, MergedColumnParallelLinearWithLoRA):
                row = wrapper.output_ids[address.index] * len(local_b)
            elif not isinstance(wrapper, RowParallelLinearWithLoRA):
                row = wrapper.tp_rank * len(local_b)
            yield b, local_b, row, 0

    @torch.inference_mode()
    def add_to(self, prints: Fingerprints) -> None:
        """Add this rank's shard of the newest adapters to the fingerprints."""
        for name, shard, row, column in self.tensors():
            prints.add(name, shard, row=row, column=column)
