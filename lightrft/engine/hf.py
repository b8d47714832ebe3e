"""The embedded engine: transformers alone, its own copy of the weights, its own sampling loop with a key-value cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lightrft.engine.base import Engine, EngineSetup, Part, Request, Sampling
from lightrft.engine.expected import end_token_ids, expected_parameters
from lightrft.parallel.device import release_cached_memory
from lightrft.types import Completion

DROP_SHARE = 0.25
"""Finished rows leave the running batch when they are this share of it: each time costs one copy of the cache."""
ROWS_AT_ONCE = 64
"""Rows whose distribution over the vocabulary is in memory in float64."""


class HFEngine(Engine):
    """Prompts of similar length are prefilled together, once each; their n samples share the prefill."""

    def __init__(self, setup: EngineSetup):
        if setup.axis.size > 1:
            raise ValueError(f"--engine_tp_size {setup.axis.size}: the hf engine runs on one rank; use --engine_type vllm, or 1")
        config = AutoConfig.from_pretrained(setup.model_path, trust_remote_code=setup.trust_remote_code)
        super().__init__(expected_parameters(config, trust_remote_code=setup.trust_remote_code),
                         sleep_level=setup.section.engine_sleep_level, max_model_len=setup.max_model_len)
        self.device, self.dtype = setup.device, setup.dtype
        self.batch_size = setup.section.micro_rollout_batch_size
        self.end_token_ids = end_token_ids(setup.model_path, config)
        self.model = _load(setup, config).eval().requires_grad_(False)
        self.weights_valid = not setup.from_stream

    def reset_cache(self) -> None:
        """Nothing to do: a cache lives inside one generate()."""

    @torch.inference_mode()
    def _generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        generator = torch.Generator().manual_seed(sampling.seed)
        seeds = torch.randint(2**62, (len(requests),), generator=generator).tolist()
        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].token_ids))
        results: dict[int, list[Completion]] = {}
        for start in range(0, len(requests), self.batch_size):
            chosen = by_length[start : start + self.batch_size]
            noise = torch.stack([_noise(seeds[index], sampling) for index in chosen]).to(self.device)
            samples = self._complete([requests[index].token_ids for index in chosen], noise.flatten(0, 1), sampling)
            results |= {index: samples[row * sampling.n : (row + 1) * sampling.n] for row, index in enumerate(chosen)}
        return [results[index] for index in range(len(requests))]

    def _complete(self, prompts: list[list[int]], noise: Tensor, sampling: Sampling) -> list[Completion]:
        """n completions of each prompt, prompt by prompt. noise [prompts x n, max_tokens] in [0, 1)."""
        ends = self.end_token_ids | set(sampling.stop_token_ids)
        end_ids = torch.tensor(sorted(ends), device=self.device, dtype=torch.int64)
        rows, logits = self._prefill(prompts, sampling.n)
        samples = [Completion([], [], "length", self.version) for _ in range(len(prompts) * sampling.n)]
        for step in range(sampling.max_tokens):
            tokens, logprobs = sample_tokens(logits, sampling.temperature, noise[rows.index, step])
            row_states = zip(rows.index.tolist(), rows.running.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
            for index, running, token, logprob in row_states:
                if running:
                    samples[index].token_ids.append(token)
                    samples[index].logprobs.append(logprob)
            rows.running &= ~torch.isin(tokens, end_ids)
            if step + 1 == sampling.max_tokens or not rows.running.any():
                break
            logits = self._decode(rows, rows.drop_finished(tokens))
        for completion in samples:
            if completion.token_ids[-1] in ends:
                completion.finish_reason = "stop"
        return samples

    def _prefill(self, prompts: list[list[int]], n: int) -> tuple["_Rows", Tensor]:
        """One row per sample, and the logits [prompts x n, V] of its first token."""
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)], device=self.device)
        mask = torch.arange(longest, device=self.device) >= torch.tensor(padding, device=self.device)[:, None]
        mask = mask.long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, positions, cache)
        cache.batch_repeat_interleave(n)
        rows = _Rows(
            index=torch.arange(len(prompts) * n, device=self.device),
            running=torch.ones(len(prompts) * n, dtype=torch.bool, device=self.device),
            mask=mask.repeat_interleave(n, 0), next_position=mask.sum(-1).repeat_interleave(n), cache=cache,
        )
        return rows, logits.repeat_interleave(n, 0)

    def _decode(self, rows: "_Rows", tokens: Tensor) -> Tensor:
        """Append one token [R] to every row; the logits [R, V] of the next."""
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(rows.mask), 1)], 1)
        logits = self._forward(tokens[:, None], rows.mask, rows.next_position[:, None], rows.cache)
        rows.next_position = rows.next_position + 1
        return logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                            use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    @torch.no_grad()
    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)

    def _sleep(self, level: int) -> None:
        """Buffers stay: they are small, and those outside the checkpoint (rotary frequencies) come in no stream."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.cpu() if level == 1 else parameter.data.new_empty(0)
        release_cached_memory(self.device)

    def _wake(self, part: Part) -> None:
        if part == "kv_cache":
            return
        for name, parameter in self.model.named_parameters():
            shape = self.expected[name]
            kept = parameter.shape == shape
            parameter.data = parameter.data.to(self.device) if kept else torch.empty(shape, dtype=self.dtype, device=self.device)

    def _close(self) -> None:
        self._sleep(level=2)


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row and its float32 log-prob under softmax(logits / temperature); temperature 0 takes the best.

    logits [R, V], uniform [R] in [0, 1): the token is the inverse of the cumulative distribution there. Returns [R], [R].
    """
    parts = [_sample(*part, temperature) for part in zip(logits.split(ROWS_AT_ONCE), uniform.split(ROWS_AT_ONCE), strict=True)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0:
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)  # float32 would lose the tail of a large vocabulary
        total = cumulative[:, -1:]
        below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not select beyond the last token
        tokens = torch.searchsorted(cumulative, torch.minimum(uniform[:, None] * total, below_total), right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@dataclass(slots=True)
class _Rows:
    """The samples in the running batch; R of them, S tokens so far with the padding on the left."""

    index: Tensor  # [R] int64, the sample of each row
    running: Tensor  # [R] bool, not finished
    mask: Tensor  # [R, S] int64, 0 for padding
    next_position: Tensor  # [R] int64
    cache: DynamicCache

    def drop_finished(self, tokens: Tensor) -> Tensor:
        """Keep the running rows only, where that is worth the copy; returns the tokens [R] of the rows that stay."""
        keep = self.running.nonzero().squeeze(1)
        if len(keep) > (1 - DROP_SHARE) * len(self.running):
            return tokens
        self.index, self.running, self.mask = self.index[keep], self.running[keep], self.mask[keep]
        self.next_position = self.next_position[keep]
        self.cache.batch_select_indices(keep)
        return tokens[keep]


def _noise(seed: int, sampling: Sampling) -> Tensor:
    """[n, max_tokens] float64 in [0, 1) of one request, whatever batch it is in."""
    if sampling.temperature == 0:
        return torch.zeros(1, 1, dtype=torch.float64).expand(sampling.n, sampling.max_tokens)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sampling.n, sampling.max_tokens, dtype=torch.float64, generator=generator)


def _load(setup: EngineSetup, config: PretrainedConfig) -> PreTrainedModel:
    options = {"dtype": setup.dtype, "trust_remote_code": setup.trust_remote_code}
    if not setup.from_stream:
        return AutoModelForCausalLM.from_pretrained(setup.model_path, **options).to(setup.device)
    with no_init_weights(), setup.device:
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    return model
