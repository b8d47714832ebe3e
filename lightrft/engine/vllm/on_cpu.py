"""Replace what vLLM computes slowly on CPUs: layers, sampling, and the last blocks of prompts.

Importing this module registers the layer. Model runner V1 samples with noise for blocks of tokens,
then for one block.
"""

from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

NUM_SEEDS = 2**53
"""How many seeds of noise there are."""
AHEAD = 32
"""Tokens whose seeds are drawn from a generator together."""
TOKEN_BLOCK = 256
"""Tokens in a block."""

_drawn: WeakKeyDictionary[torch.Generator, list[list[int]]] = WeakKeyDictionary()
"""Seeds drawn from a request's generator and not used yet: two for each token, the next token's
last."""


@RMSNorm.register_oot(name="RMSNorm")
class _HostRMSNorm(RMSNorm):
    """RMSNorm with vLLM's CPU kernel, 5 to 10 times as fast as separate torch operations.

    vLLM does not select the kernel by default. Its vectors have up to 16 elements. It is used in
    float32 only, because in bfloat16 the rounding differs from transformers'.
    """

    def forward_cpu(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.weight
        plain = self.has_weight and self.variance_size_override is None
        if not plain or not x.dtype == weight.dtype == torch.float32 or x.shape[-1] % 16:
            return self.forward_native(x, residual)
        if residual is None:
            normed = x.new_empty(x.shape)
            torch.ops._C.rms_norm.default(normed, x.contiguous(), weight, self.variance_epsilon)
            return normed

        if not x.is_contiguous() or not residual.is_contiguous():
            return self.forward_native(x, residual)

        torch.ops._C.fused_add_rms_norm.default(x, residual, weight, self.variance_epsilon)
        return x, residual


def replace_slow_operations(model: torch.nn.Module, sampler: Any, *, eager: bool) -> None:
    """Let a model skip what it does not need, and the sampler of model runner V1 sample fast.

    After each load vLLM packs a copy of every embedding for products. Only heads have any; an
    embedding that is a head too keeps its copy. An `eager` model calls the functions of attention
    themselves: only a compiler needs operators of torch, whose dispatcher takes time.
    """
    heads = {id(head.weight) for head in model.modules() if isinstance(head, ParallelLMHead)}
    for layer in model.modules():
        if eager and isinstance(layer, Attention):
            layer.use_direct_call = True

        # Without a layer for the head, the embedding itself is the head.
        is_input = heads and type(layer) is VocabParallelEmbedding and id(layer.weight) not in heads
        if is_input and type(layer.quant_method) is UnquantizedEmbeddingMethod:
            layer.quant_method.process_weights_after_loading = lambda _: None
            layer.cpu_linear = torch.nn.functional.linear

    if isinstance(sampler, Sampler):
        use_fast_sampling(sampler)


def use_fast_sampling(sampler: Sampler) -> None:
    """Replace the operations of a sampler that vLLM 0.32 computes slowly on a CPU.

    vLLM draws noise for the whole vocabulary for each token, and divides all logits by the
    temperature even if it is 1. It also looks for the rank of the sampled token, by comparing the
    log-probs of the whole vocabulary in a function that needs a C++ compiler; nobody reads the
    rank. The ones here pass probabilities to each other instead of log-probs, and compute the
    logarithm for sampled tokens only.
    """
    if sampler.topk_topp_sampler.forward == sampler.topk_topp_sampler.forward_cpu:
        sampler.topk_topp_sampler.forward = _FastSampling()
        sampler.compute_logprobs = lambda logits: logits.softmax(-1, dtype=torch.float32)
        sampler.gather_logprobs = _gather_logprobs
        sampler.apply_temperature = _apply_temperature


def copy_of(generator: torch.Generator) -> torch.Generator:
    """Return a generator whose next numbers are the same as those `generator` will draw."""
    copy = generator.clone_state()
    if drawn := _drawn.get(generator):
        _drawn[copy] = drawn.copy()
    return copy


def draw(probabilities: Tensor, seeds: Tensor) -> Tensor:
    """Draw tokens [R] from `probabilities` [R, V] with `seeds` [2, R]: a block, then a token in it.

    Noise takes several times as long as a softmax. Here a row needs it for V / B + B tokens instead
    of V, where B is TOKEN_BLOCK. Rows with the same seeds and similar probabilities mostly draw the
    same token, and drafts depend on that. One number and running sums would not do: a difference at
    one token moves the numbers of all later ones.
    """
    # draws indices [R] by the Gumbel-max trick, from logarithms [R, N] and seeds [R]
    gumbel_max = torch.ops._C.fused_gumbel_argmax
    num_tokens = probabilities.shape[1]
    if num_tokens <= TOKEN_BLOCK:
        return gumbel_max(probabilities.log(), seeds[0])
    blocks, rest = probabilities.tensor_split((num_tokens // TOKEN_BLOCK * TOKEN_BLOCK,), 1)
    sums = torch.cat([blocks.unflatten(1, (-1, TOKEN_BLOCK)).sum(2), rest.sum(1, keepdim=True)], 1)
    tokens = TOKEN_BLOCK * gumbel_max(sums.log(), seeds[0])[:, None] + torch.arange(TOKEN_BLOCK)
    inside = probabilities.gather(1, tokens.clamp(max=num_tokens - 1)).masked_fill_(
        tokens >= num_tokens, 0
    )
    return tokens.gather(1, gumbel_max(inside.log(), seeds[1])[:, None]).squeeze(1)


class _FastSampling:
    """Replacement for TopKTopPSampler.forward_cpu()."""

    def __init__(self) -> None:
        self._items: list[tuple[int, torch.Generator]] = []
        """(row, generator) of the last step."""
        self._rows: list[int] = []
        self._seeds: list[list[list[int]]] = []

    def __call__(
        self,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sample tokens [R] of logits [R, V] at the temperature; return also all probabilities.

        The probabilities [R, V] replace the logits: new memory would take several times as long.
        Rows without a generator are greedy, and vLLM does not use their tokens.
        """
        logits = apply_top_k_top_p(logits, k, p).float()
        probabilities = torch.softmax(logits, -1, out=logits)
        return draw(probabilities, self._next_seeds(len(logits), generators)), probabilities

    def _next_seeds(self, num_rows: int, generators: dict[int, torch.Generator]) -> Tensor:
        items = list(generators.items())
        if items != self._items:
            self._items = items
            self._rows = list(generators)
            self._seeds = [_drawn.setdefault(generator, []) for generator in generators.values()]

        if not all(self._seeds):
            for seeds, generator in zip(self._seeds, generators.values(), strict=True):
                if not seeds:
                    drawn = torch.randint(0, NUM_SEEDS, (AHEAD, 2), generator=generator)
                    seeds += drawn.tolist()[::-1]

        result = np.zeros((2, num_rows), dtype=np.int64)
        result[:, self._rows] = np.array([seeds.pop() for seeds in self._seeds]).T
        return torch.from_numpy(result)


def _apply_temperature(logits: Tensor, temperature: Tensor, all_random: bool) -> Tensor:
    """Divide logits [R, V] in place by the temperatures [R]; 0 belongs to a greedy row."""
    if (temperature == 1.0).all():
        return logits
    return Sampler.apply_temperature(logits, temperature, all_random)


def _gather_logprobs(
    probabilities: Tensor, num_logprobs: int, token_ids: Tensor
) -> LogprobsTensors:
    """Return the log-probs of sampled tokens [R], given probabilities [R, V]; all get rank 0."""
    if num_logprobs:
        return Sampler.gather_logprobs(probabilities.log(), num_logprobs, token_ids)
    ranks = torch.zeros(len(token_ids), dtype=torch.int64)
    token_ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(token_ids.int(), probabilities.gather(-1, token_ids).log(), ranks)


def share_last_blocks(cache: KVCacheManager) -> bool:
    """Let samples find the last block of the prompt too, so that it is computed once.

    vLLM shares whole blocks of the cache. It can also give a request a copy of a block that is
    shared in part, but it looks for such blocks only in models with recurrent states. Here the
    first sample of a request is computed one step before the others. The others get a copy of the
    block where the prompt ends, and compute only the prompt's last token.

    Return False if the model has other layers than full attention.
    """
    managers = cache.coordinator.single_type_managers
    if [type(manager) for manager in managers] != [FullAttentionManager]:
        return False

    (manager,), whole_blocks = managers, cache.get_computed_blocks
    firsts: WeakValueDictionary[tuple[str, str | None], Request] = WeakValueDictionary()

    def computed_blocks(request: Request, *longest: int | None) -> tuple[KVCacheBlocks, int, int]:
        """Return blocks that the request starts with, and how many tokens in them are computed.

        The last number is 0 here. vLLM 0.33 also says how many tokens may be computed at most, or
        None.
        """
        # Samples that begin after other weights were loaded have another salt.
        key = request.request_id.rpartition("/")[0], request.cache_salt
        first = firsts.setdefault(key, request)
        blocks = manager.req_to_blocks.get(first.request_id)
        if not blocks:  # it has not begun, or has ended
            firsts[key] = request
            return whole_blocks(request, *longest)
        is_computed = first.num_computed_tokens >= request.num_prompt_tokens
        if request.num_output_tokens or not is_computed or any(longest):
            return whole_blocks(request, *longest)

        num_computed = request.num_prompt_tokens - 1
        return KVCacheBlocks((blocks[: -(-num_computed // manager.block_size)],)), num_computed, 0

    cache.get_computed_blocks = computed_blocks
    return True
