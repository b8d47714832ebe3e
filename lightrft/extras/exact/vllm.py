"""vLLM on a CPU with the trainer's own modules, attention, products and log-probs.

vLLM schedules, and keeps the pages of keys and values. The model is transformers', and one sampler
computes logits, tokens and log-probs from hidden states.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from vllm import ModelRegistry, SamplingParams
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lightrft.config.errors import ConfigError
from lightrft.engine.base import EngineSetup
from lightrft.engine.probe import Probe
from lightrft.engine.requests import Sampling
from lightrft.engine.vllm import VLLMEngine
from lightrft.engine.vllm.arguments import EXACT_MODEL
from lightrft.extras.exact.attention import PagedRows
from lightrft.extras.exact.hf import ExactHead
from lightrft.extras.exact.install import make_exact
from lightrft.models.qwen_omni import load_config
from lightrft.models.weight_sync.names import NamedTensor

SAMPLING_KEY = "lightrft"
"""Key of a request's temperature and truncation among vLLM's extra arguments."""


class ExactVLLMEngine(VLLMEngine):
    """vLLM engine on a CPU with the same log-probs as the trainer, bit by bit."""

    def _start(self, setup: EngineSetup, config: PretrainedConfig) -> list[str]:
        if config.get_text_config() is not config:
            raise ConfigError(f"--exact with vLLM needs a model of text, not {config.model_type}")

        unknown = super()._start(setup, config)
        if self._llm.llm_engine.vllm_config.use_v2_model_runner:
            raise ConfigError("--exact with vLLM needs VLLM_USE_V2_MODEL_RUNNER=0")
        self.model: ExactModel = self._shim.model
        runner = self._shim.worker.model_runner
        runner.sampler = ExactSampler(self.model.head, runner)
        return unknown

    def _load_base(self, named_tensors: Iterator[NamedTensor]) -> None:
        weights = self.model.head.model.state_dict(keep_vars=True)
        for name, tensor in named_tensors:
            weights[name].copy_(tensor)
            # Otherwise the next tensor would be gathered beside this one.
            del tensor

    def _parameters(self, sampling: Sampling, seed: int) -> SamplingParams:
        parameters = super()._parameters(sampling, seed)
        parameters.extra_args = {SAMPLING_KEY: (sampling.temperature, sampling.truncation)}
        return parameters

    @torch.inference_mode()
    def _module_outputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        probe = Probe(len(token_ids))
        hidden = []
        hook = self.model.register_forward_hook(
            lambda module, inputs, output: hidden.append(output[-1:])
        )
        with hook, probe.attached(self.model):
            self._compute(token_ids)
        return probe.recorded(self.model.head.last_logits(hidden[0]))

    def _close(self) -> None:
        del self.model
        super()._close()


class ExactModel(nn.Module):
    """A model of transformers for vLLM, with parameters under their own names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        options = vllm_config.model_config
        config = load_config(options.model, trust_remote_code=options.trust_remote_code)
        # While vLLM starts, torch's default is the model's dtype.
        with no_init_weights(), set_default_torch_dtype(torch.float32):
            causal = AutoModelForCausalLM.from_config(
                config, dtype=options.dtype, trust_remote_code=options.trust_remote_code
            )
            products = make_exact(causal, options.dtype, torch.device("cpu"))
        causal.tie_weights()
        self.head = ExactHead(products, causal)
        self.model = causal.base_model
        self.lm_head = causal.get_output_embeddings()

        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.caches = [
            LayerCache(f"layers.{layer}", vllm_config, key_heads, width)
            for layer in range(config.num_hidden_layers)
        ]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, *_: None, **__: None) -> Tensor:
        """Return the hidden states [T, H] of new tokens [T] of all requests."""
        batches = get_forward_context().attn_metadata
        if batches is None:  # vLLM warms up
            return self.embed_input_ids(input_ids)

        batch = batches[self.caches[0].name]
        rows = PagedRows.of(
            [cache.kv_cache for cache in self.caches],
            batch.slot_mapping[: len(input_ids)],
            batch.block_table_tensor,
            batch.seq_lens,
            batch.query_start_loc_cpu.diff().tolist(),
        )
        inputs = {"input_ids": input_ids[None], "position_ids": positions[None]}
        outputs = self.model(**inputs, attention_mask=None, use_cache=False, layout=rows)
        return outputs.last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states: logits depend on the temperature, and the sampler knows it."""
        return hidden_states

    def load_weights(self, weights: Iterable[NamedTensor]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


class LayerCache(AttentionLayerBase):
    """Pages of keys and values of a layer.

    vLLM keeps all tokens of a layer with a window too, and attention reads those in the window.
    """

    kv_cache: Tensor

    def __init__(self, name: str, vllm_config: VllmConfig, num_heads: int, head_size: int):
        self.name = name
        self.spec = FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=num_heads,
            head_size=head_size,
            dtype=vllm_config.model_config.dtype,
        )
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ExactBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        return self.spec


class ExactBackend(AttentionBackend):
    """Tells vLLM that attention takes what describes a batch as it is."""

    @staticmethod
    def get_name() -> str:
        return "LIGHTRFT_EXACT"

    @staticmethod
    def get_builder_cls() -> type["BatchAsItIs"]:
        return BatchAsItIs


class BatchAsItIs(AttentionMetadataBuilder):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *_, **__
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class ExactSampler(nn.Module):
    """Replacement for vLLM's sampler, which computes logits too."""

    def __init__(self, head: ExactHead, runner: GPUModelRunner):
        super().__init__()
        self.head = head
        self.runner = runner

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Sample from hidden states [R, H], which the model returns instead of logits."""
        rows_of: dict[tuple, list[int]] = {}
        for row, name in enumerate(self.runner.input_batch.req_ids):
            sampling = self.runner.requests[name].sampling_params.extra_args[SAMPLING_KEY]
            rows_of.setdefault(sampling, []).append(row)

        tokens = torch.empty(len(logits), 1, dtype=torch.int32)
        logprobs = torch.empty(len(logits), 1)
        uniform = torch.zeros(len(logits), dtype=torch.float64)
        for row, generator in sampling_metadata.generators.items():
            uniform[row] = torch.rand((), dtype=torch.float64, generator=generator)
        for (temperature, truncation), rows in rows_of.items():
            some = self.head.sample(logits[rows], temperature, uniform[rows], truncation)
            tokens[rows, 0] = some[0].int()
            logprobs[rows, 0] = some[1]

        ranks = torch.zeros(len(logits), dtype=torch.int64)  # nobody reads them
        return SamplerOutput(tokens, LogprobsTensors(tokens, logprobs, ranks))


ModelRegistry.register_model(EXACT_MODEL, ExactModel)
