"""The embedded engine: transformers only, with a separate sampling loop and key-value cache."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lightrft.core.batch import RoutedShape, concatenated_features
from lightrft.core.engine import ABORTED, Request
from lightrft.core.samples import Completion
from lightrft.engine.base import EngineSetup, Half
from lightrft.engine.probe import Probe
from lightrft.engine.requests import Sampling, drawn_tokens
from lightrft.engine.start import FolderEngine
from lightrft.engine.stops import StopStrings
from lightrft.models.attention.layout import bidirectional_token
from lightrft.models.attention.recurrent import lift_time_step_limits
from lightrft.models.logits.truncation import ALL, Truncation, without_padding
from lightrft.models.parallel.device import float32_product, grow_segments, release_cached_memory
from lightrft.models.parallel.expert_parallel import routers
from lightrft.models.qwen_omni import generating_class
from lightrft.models.weight_sync.adapters import Adapters, low_rank_product, names_of
from lightrft.models.weight_sync.names import PublishedNames
from lightrft.models.weight_sync.verify import Fingerprints

DROP_SHARE = 0.25
"""Finished rows leave the running batch when they are this share of it; that copies the cache."""
ROWS_AT_ONCE = 64
"""Rows whose distribution over the vocabulary is held in float64 at once."""


class HFEngine(FolderEngine):
    """Engine that prefills prompts of similar length together; the n samples share a prefill."""

    def __init__(self, setup: EngineSetup):
        if setup.axis.size > 1:
            raise ValueError(
                f"--engine_tp_size {setup.axis.size}: the hf engine runs on one rank; "
                "use --engine_type vllm or sglang, or 1"
            )

        if setup.section.engine_args:
            raise ValueError(
                "--engine_args are arguments of vLLM or SGLang, and the hf engine has none"
            )

        super().__init__(setup)
        config = self.config
        self.in_space = has_positions_in_space(config)
        self.bidirectional = bidirectional_token(config)
        self.reader.media_alone = self.in_space or self.bidirectional is not None
        self.dtype = setup.dtype
        self.batch_size = setup.section.micro_rollout_batch_size
        grow_segments(self.device)
        self.model = _load(setup, config).eval().requires_grad_(False)
        lift_time_step_limits(self.model)
        if self.dtype != torch.float32:
            head = self.model.get_output_embeddings()
            head.forward = partial(_float32_logits, head)
        self.weights = self.model.state_dict(keep_vars=True)
        """Name -> the model's own tensor, wherever it is stored."""
        if setup.adapters is not None:
            self.weights |= _add_adapters(self.model, setup.adapters)
        self.weights_valid = not setup.from_stream
        self.routed = _RoutedExperts(self.model) if setup.section.router_replay else None
        self.sample = sample_tokens
        self._waiting: dict[int, Request] = {}
        self._samples: _Samples | None = None
        """Samples of the running batch."""
        self._decoding: Iterator[list[tuple[int, list[Completion]]]] = iter(())

    @classmethod
    def adapter_problem(
        cls, setup: EngineSetup, names: PublishedNames, media: Collection[str]
    ) -> str | None:
        return None

    def prompts_at_once(self, n: int) -> int:
        return self.batch_size

    def reset_cache(self) -> None:
        """Do nothing: a cache exists only within one generate()."""

    def _add(self, key: int, request: Request) -> None:
        self._waiting[key] = request

    @torch.inference_mode()
    def _step(self) -> list[tuple[int, list[Completion]]]:
        """Compute a token of each sample in the batch.

        After a batch has ended, the shortest prompts that wait form the next one.
        """
        while (finished := next(self._decoding, None)) is None:
            if not self._waiting:
                return []
            self._decoding = self._decode_batch(self._next_batch())
        return finished

    def _abort(self, key: int) -> list[Completion]:
        request = self._waiting.pop(key, None)
        if request is not None:
            return [Completion([], [], ABORTED) for _ in request.seeds]
        return self._samples.abort(key)

    def _num_sampled(self, key: int) -> list[int]:
        waiting = self._waiting.get(key)
        return [0] * len(waiting.seeds) if waiting else self._samples.lengths(key)

    def _leave_cache(self) -> None:
        """Do nothing: no two batches share a cache."""

    def _next_batch(self) -> list[tuple[int, Request]]:
        """Take the shortest waiting prompts that share one sampling."""
        in_order = sorted(self._waiting.items(), key=lambda item: len(item[1].prompt))
        batch = [item for item in in_order if item[1].sampling == in_order[0][1].sampling][
            : self.batch_size
        ]
        for key, _ in batch:
            del self._waiting[key]
        return batch

    def _decode_batch(
        self, batch: list[tuple[int, Request]]
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Yield after each token the requests that have ended, with n completions each."""
        keys, prompts = zip(*batch, strict=True)
        sampling = prompts[0].sampling
        # Noise in [0, 1) that depends only on the seeds, so batching changes no sample.
        seeds = [seed for request in prompts for seed in request.seeds]
        noise = _noise(seeds, sampling).to(self.device)
        lengths = [len(request.prompt) for request in prompts]
        samples = self._samples = self._empty_samples(sampling, keys, lengths)

        rows, logits = self._prefill(prompts, sampling.n)
        if self.routed:
            samples.begin_experts(self.routed.newest(len(prompts)), lengths)
        for step in range(sampling.max_tokens):
            tokens, logprobs = self.sample(
                logits, sampling.temperature, noise[rows.index, step], sampling.truncation
            )
            sampled = zip(
                rows.index.tolist(), rows.running, tokens.tolist(), logprobs.tolist(), strict=True
            )
            rows.running = [
                running and samples.add(index, token, logprob)
                for index, running, token, logprob in sampled
            ]
            yield samples.finished()

            if samples.num_aborted:
                rows.running = [
                    running and samples.missing[index // sampling.n] > 0
                    for index, running in zip(rows.index.tolist(), rows.running, strict=True)
                ]

            if not any(rows.running):
                break
            logits = self._decode(rows, rows.drop_finished(tokens))
            if self.routed:
                samples.add_experts(rows, self.routed.newest(len(rows.index))[:, 0])

    def _empty_samples(
        self, sampling: Sampling, keys: tuple[int, ...], lengths: list[int]
    ) -> "_Samples":
        """Return empty samples of the requests `keys`.

        All samples of a prompt but the first count the prompt's tokens as cached.
        """
        ends = self.vocabulary.end_token_ids | set(sampling.stop_token_ids)
        stops = StopStrings(self.vocabulary.tokenizer, sampling.stop) if sampling.stop else None
        completions = [
            Completion([], [], "length", length if sample else 0)
            for length in lengths
            for sample in range(sampling.n)
        ]
        return _Samples(sampling, completions, ends, stops, list(keys))

    def _prefill(self, requests: Sequence[Request], n: int) -> tuple["_Rows", Tensor]:
        """Return one row per sample, and the logits [prompts x n, V] of the first token."""
        prompts = [request.prompt for request in requests]
        longest = max(len(prompt) for prompt in prompts)
        # Padding is on the left, so that all rows continue at the same position.
        padding = [longest - len(prompt) for prompt in prompts]
        padded = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(padded, device=self.device)
        columns = torch.arange(longest, device=self.device)
        mask = (columns >= torch.tensor(padding, device=self.device)[:, None]).long()
        cache = DynamicCache(config=self.model.config)

        expanded = [request.expanded.features for request in requests if request.expanded]
        media = concatenated_features(expanded) if expanded else {}
        media = {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in media.items()
        }
        positions = self._positions(ids, mask, media)
        if media and self.bidirectional is not None:
            media["token_type_ids"] = (ids == self.bidirectional).long()
        logits = self._forward(ids, mask, positions, cache, **media)
        # Layers with a recurrent state have no other verb for this.
        prompt_of_row = torch.arange(len(prompts), device=self.device).repeat_interleave(n)
        cache.reorder_cache(prompt_of_row)

        next_position = positions.view(-1, *ids.shape)[..., -1].amax(0) + 1
        rows = _Rows(
            index=torch.arange(len(prompts) * n, device=self.device),
            running=[True] * (len(prompts) * n),
            mask=mask.repeat_interleave(n, 0),
            cache=cache,
            next_position=next_position.repeat_interleave(n),
        )
        return rows, logits.repeat_interleave(n, 0)

    def _positions(self, ids: Tensor, mask: Tensor, media: dict[str, Tensor]) -> Tensor:
        """Return positions [R, S], or [3, R, S] in time, row and column for models with M-RoPE.

        arXiv 2409.12191.
        """
        grids = {name: tensor for name, tensor in media.items() if "grid" in name}
        if not (self.in_space and grids):  # sound has positions like those of text
            return (mask.cumsum(-1) - 1).clamp(min=0)
        kinds = torch.zeros_like(ids)
        for kind, medium in enumerate(("image", "video"), 1):  # the numbering of transformers
            for token in self.vocabulary.placeholders[medium]:
                kinds[ids == token] = kind
        return self.model.base_model.get_rope_index(
            ids, mm_token_type_ids=kinds, attention_mask=mask, **grids
        )[0]

    def _decode(self, rows: "_Rows", tokens: Tensor) -> Tensor:
        """Append one token [R] to every row; return the logits [R, V] of the next token."""
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(rows.mask), 1)], 1)
        logits = self._forward(tokens[:, None], rows.mask, rows.next_position[:, None], rows.cache)
        rows.next_position = rows.next_position + 1
        return logits

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache, **media: Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **media,
        )
        return output.logits[:, -1]

    @torch.no_grad()
    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            self.weights[name].copy_(tensor)
            # Otherwise the next tensor would be gathered beside this one.
            del tensor

    @torch.inference_mode()
    def _engine_fingerprints(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        for name in prints.shapes:
            prints.add(name, self.weights[name])
        return prints.numbers(self.device)

    _adapter_fingerprints = _engine_fingerprints

    def _num_cached(self) -> int:
        return 0

    @torch.inference_mode()
    def _module_outputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        probe = Probe(len(token_ids))
        with probe.attached(self.model):
            logits = self.model(
                input_ids=torch.tensor([token_ids], device=self.device), logits_to_keep=1
            ).logits
        return probe.recorded(logits[0, -1])

    def _sleep(self, level: int) -> None:
        """Release the parameters.

        Buffers stay: they are small, and non-persistent ones (rotary frequencies) are not streamed.
        """
        for parameter in self.model.parameters():
            parameter.data = parameter.data.cpu() if level == 1 else parameter.data.new_empty(0)
        release_cached_memory(self.device)

    def _wake(self, half: Half) -> None:
        if half == "kv_cache":
            return
        for name, parameter in self.model.named_parameters():
            shape = self.expected[name]
            if parameter.shape == shape:
                parameter.data = parameter.data.to(self.device)
            else:
                parameter.data = torch.empty(shape, dtype=self.dtype, device=self.device)

    def _close(self) -> None:
        self._sleep(level=2)


def _float32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute logits [..., V] in float32, as the trainer does, from hidden states [..., H]."""
    flat = hidden.flatten(0, -2)
    logits = torch.empty(len(flat), len(head.weight), dtype=torch.float32, device=hidden.device)
    logits = float32_product(flat, head.weight, logits).view(*hidden.shape[:-1], -1)
    return logits if head.bias is None else logits + head.bias


def sample_tokens(
    logits: Tensor, temperature: float, uniform: Tensor, truncation: Truncation = ALL
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with the float32 log-prob under softmax(logits / temperature).

    logits [R, V] are restricted to a part of the vocabulary. uniform [R] in [0, 1): the token is
    the inverse of the cumulative distribution at that number. Temperature 0 selects the most likely
    token, with the log-prob at temperature 1. Returns [R], [R].
    """
    size, truncation = without_padding(truncation, logits.shape[1])
    sampled = []
    for rows, numbers in zip(logits.split(ROWS_AT_ONCE), uniform.split(ROWS_AT_ONCE), strict=True):
        scaled = rows[:, :size].float() / (temperature or 1.0)
        logprobs = torch.log_softmax(truncation(scaled) if truncation.active else scaled, -1)
        if temperature == 0:
            tokens = logprobs.argmax(-1, keepdim=True)
        else:
            # Logits that are no numbers have no order; the log-prob of any token says so.
            tokens = drawn_tokens(logprobs, numbers).clamp_(max=size - 1)
        sampled.append((tokens, logprobs.gather(1, tokens)))

    tokens, logprobs = (torch.cat(found).squeeze(1) for found in zip(*sampled, strict=True))
    return tokens, logprobs


@dataclass(slots=True)
class _Samples:
    """Completions of one running batch, ordered by prompt."""

    sampling: Sampling
    completions: list[Completion]
    ends: set[int]
    stops: StopStrings | None
    requests: list[int]
    """Index of the request that each prompt belongs to."""
    missing: list[int] = field(init=False)
    """How many samples of each prompt still run."""
    complete: list[int] = field(default_factory=list)
    """Prompts that are complete and not yet yielded."""
    num_aborted: int = 0
    experts: list[list[np.ndarray]] = field(default_factory=list)
    """Chosen experts of each sample in chunks, [tokens, layers, k] each, with --router_replay."""

    def __post_init__(self) -> None:
        self.missing = [self.sampling.n] * len(self.requests)

    def add(self, index: int, token: int, logprob: float) -> bool:
        """Add a token to a sample; return True if the sample continues."""
        sample = self.completions[index]
        sample.token_ids.append(token)
        sample.logprobs.append(logprob)

        if token in self.ends or (self.stops is not None and self.stops.match(sample.token_ids)):
            sample.finish_reason = "stop"
        elif len(sample.token_ids) < self.sampling.max_tokens:
            return True

        prompt = index // self.sampling.n
        self.missing[prompt] -= 1
        if not self.missing[prompt]:
            self.complete.append(prompt)

        return False

    def begin_experts(self, experts: np.ndarray, lengths: list[int]) -> None:
        """Begin the records with the prompts, [prompts, S, layers, k] with padding on the left."""
        self.experts = [
            [prompt[len(prompt) - length :]]
            for prompt, length in zip(experts, lengths, strict=True)
            for _ in range(self.sampling.n)
        ]

    def add_experts(self, rows: "_Rows", experts: np.ndarray) -> None:
        """Add the experts of the newest token of each row that runs, [R, layers, k]."""
        for index, running, token in zip(rows.index.tolist(), rows.running, experts, strict=True):
            if running:
                self.experts[index].append(token[None])

    def finished(self) -> list[tuple[int, list[Completion]]]:
        """Return the request and the completions of each prompt that has become complete."""
        complete, self.complete = self.complete, []
        return [(self.requests[prompt], self._of(prompt)) for prompt in complete]

    def abort(self, request: int) -> list[Completion]:
        """End the samples of a request; return them."""
        prompt = self.requests.index(request)
        self.missing[prompt] = 0
        self.num_aborted += 1

        samples = self._of(prompt)
        limit = self.sampling.max_tokens
        # "length" is the reason from the start, so it says nothing about a short sample.
        for sample in samples:
            if sample.finish_reason == "length" and len(sample.token_ids) < limit:
                sample.finish_reason = ABORTED

        return samples

    def lengths(self, request: int) -> list[int]:
        """Return how many tokens each sample of a request has."""
        return [len(sample.token_ids) for sample in self._of(self.requests.index(request))]

    def _of(self, prompt: int) -> list[Completion]:
        rows = slice(prompt * self.sampling.n, (prompt + 1) * self.sampling.n)
        for completion, chunks in zip(self.completions[rows], self.experts[rows], strict=False):
            completion.experts = np.concatenate(chunks)
        return self.completions[rows]


@dataclass(slots=True)
class _Rows:
    """R samples in the running batch, with S tokens so far, including padding on the left."""

    index: Tensor  # [R] int64, the sample of each row
    running: list[bool]  # [R], not finished; kept on the host
    mask: Tensor  # [R, S] int64, 0 for padding
    next_position: Tensor  # [R] int64
    cache: DynamicCache

    def drop_finished(self, tokens: Tensor) -> Tensor:
        """Remove finished rows if that is worth the copy; return the tokens [R] that stay."""
        alive = [row for row, running in enumerate(self.running) if running]
        if len(alive) > (1 - DROP_SHARE) * len(self.running):
            return tokens
        keep = torch.tensor(alive, device=tokens.device)
        self.index = self.index[keep]
        self.running = [True] * len(alive)
        self.mask = self.mask[keep]
        self.next_position = self.next_position[keep]
        self.cache.reorder_cache(keep)
        return tokens[keep]


class _RoutedExperts:
    """Keeps the experts that the routers of a model chose in the newest forward pass."""

    def __init__(self, model: PreTrainedModel):
        self.shape = RoutedShape.of(model.config)
        self.chosen: dict[int, Tensor] = {}
        """Number of a layer -> expert ids [tokens, k]."""
        for number, router in routers(model).items():
            router.register_forward_hook(partial(self._take, number))

    def _take(self, number: int, _: nn.Module, __: tuple, output: tuple[Tensor, ...]) -> None:
        self.chosen[number] = output[2]

    def newest(self, num_rows: int) -> np.ndarray:
        """Return the experts of the newest pass: [num_rows, S, layers, k]."""
        first = next(iter(self.chosen.values()))
        experts = self.shape.empty(len(first)).to(first.device)
        for number, chosen in self.chosen.items():
            experts[:, number] = chosen.to(experts.dtype)
        return experts.unflatten(0, (num_rows, -1)).cpu().numpy()


def _noise(seeds: list[int], sampling: Sampling) -> Tensor:
    """Return uniform noise [seeds, max_tokens] float64 in [0, 1), one row for each sample."""
    if sampling.temperature == 0:
        return torch.zeros(1, 1, dtype=torch.float64).expand(len(seeds), sampling.max_tokens)
    noise = [np.random.default_rng(seed).random(sampling.max_tokens) for seed in seeds]
    return torch.from_numpy(np.stack(noise))


def _load(setup: EngineSetup, config: PretrainedConfig) -> PreTrainedModel:
    options = {"dtype": setup.dtype, "trust_remote_code": setup.trust_remote_code}
    kind = generating_class(config)
    if not setup.from_stream:
        model = kind.from_pretrained(setup.model_path, config=config, **options)
        return model.to(setup.device)

    with no_init_weights(), setup.device:
        model = kind.from_config(config, **options)
    model.tie_weights()
    return model


def _add_adapters(model: PreTrainedModel, adapters: Adapters) -> dict[str, Tensor]:
    """Let the layers add the output of adapters that are 0; return them by peft's names.

    They take the memory of the newest adapters only, so they stay while the engine sleeps.
    """
    tensors: dict[str, Tensor] = {}
    for name in adapters.layers:
        layer = model.get_submodule(name)
        pair = [
            torch.zeros(adapters.shapes[key], dtype=layer.weight.dtype, device=layer.weight.device)
            for key in names_of(name)
        ]
        layer.register_forward_hook(partial(_with_adapter, pair))
        tensors |= zip(names_of(name), pair, strict=True)
    return tensors


def _with_adapter(
    pair: list[Tensor], layer: nn.Module, inputs: tuple[Tensor], output: Tensor
) -> Tensor:
    return output + low_rank_product(inputs[0], *pair)


def has_positions_in_space(config: PretrainedConfig) -> bool:
    """Return True if image and video tokens have positions in time, row and column (M-RoPE)."""
    return "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
