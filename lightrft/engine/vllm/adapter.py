"""Adapter of vLLM to the interface of all engines."""

import gc
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby

import torch
import vllm
from transformers import PretrainedConfig
from vllm import LLM, SamplingParams
from vllm.inputs import MultiModalInput, tokens_input
from vllm.v1.engine import EngineCoreRequest

from lightrft.core.engine import Request
from lightrft.core.samples import Completion, Expanded
from lightrft.engine.base import EngineError, EngineSetup, Half
from lightrft.engine.probe import Probe, logits_processor
from lightrft.engine.requests import Sampling
from lightrft.engine.start import LibraryEngine
from lightrft.engine.vllm import loader  # noqa: F401  registered by its import
from lightrft.engine.vllm.adapter_slots import slots_problem
from lightrft.engine.vllm.arguments import arguments, mamba2_problem, replay_problem
from lightrft.engine.vllm.on_cpu import replace_slow_operations, share_last_blocks
from lightrft.engine.vllm.shim import VLLMShim
from lightrft.engine.vllm.speculation import Speculation
from lightrft.models.logits.truncation import Truncation, without_padding
from lightrft.models.parallel.device import (
    grow_segments,
    random_state_kept,
    release_cached_memory,
    torch_state_kept,
)
from lightrft.models.qwen_omni import OmniThinkerConfig, load_config, whole_config
from lightrft.models.weight_sync.adapters import Adapters
from lightrft.models.weight_sync.names import DRAFT, NamedTensor, PublishedNames
from lightrft.models.weight_sync.verify import Fingerprints, destroy_weights

OTHER_TIMES = ("qwen2_vl", "qwen2_5_vl")
"""Families whose positions of text differ from transformers', after a video that is longer than it
is wide."""
CAUSAL_ON_CPU = ("gemma3",)
"""Families whose image tokens attend in both directions, except in vLLM on a CPU."""
BFLOAT16_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose kernel for linear attention computes only bfloat16 on a CPU."""


class VLLMEngine(LibraryEngine):
    """vLLM engine that submits each sample as a request with a seed, in both model runners.

    For requests without a seed, runner V2 would draw from numpy's global generator and V1 from
    torch's. Samples are reproducible for equal seeds, whatever the batch, up to rounding in kernels
    that depends on the batch or on cached prefixes. With seeds vLLM 0.32 truncates by its own
    Triton kernel, without sorting: FlashInfer's sampler draws with one generator for all requests.
    """

    quantizes = True

    def __init__(self, setup: EngineSetup):
        super().__init__("vllm", vllm.__version__, setup)
        self.keeps_policy = self.adapters is not None

    def _start(self, setup: EngineSetup, config: PretrainedConfig) -> list[str]:
        if isinstance(config, OmniThinkerConfig) and whole_config(setup.model_path) is None:
            raise ValueError(
                "the folder has the thinker of a Qwen2.5-Omni alone, and vLLM reads whole folders"
                " only: use the whole folder (only the thinker of it is loaded), or"
                " --engine_type hf"
            )

        family = config.model_type.removesuffix("_text")
        if problem := mamba2_problem(config):
            raise ValueError(
                f"{config.model_type} can be trained, but not with vLLM, {problem}: use"
                " --engine_type hf"
            )
        if self.on_cpu and family in BFLOAT16_FAMILIES and setup.dtype != torch.bfloat16:
            raise ValueError(
                f"on a CPU vLLM computes the linear attention of {config.model_type} only in"
                " bfloat16: use --bf16, or --engine_type hf"
            )

        if setup.section.router_replay and (problem := replay_problem(config, on_cpu=self.on_cpu)):
            raise ValueError(f"--router_replay: {problem}: use --engine_type hf")

        if config.model_type in OTHER_TIMES:
            self.limits.pop("videos", None)
        if self.on_cpu and setup.section.rollout_quantization == "int8":
            from lightrft.engine.vllm import int8_on_cpu  # noqa: F401  registered by its import
        if self.on_cpu and "enable_expert_parallel" in setup.section.engine_args:
            from lightrft.engine.vllm import experts_on_cpu  # noqa: F401  as above

        memory = VLLMShim.unique_shared_memory(setup.axis) if self.on_cpu else nullcontext()
        with (
            random_state_kept(self.device),
            memory,
            VLLMShim.rank_in_environment(),
            VLLMShim.experts_on_all_ranks(),
            warnings.catch_warnings(),
        ):
            for category in (DeprecationWarning, FutureWarning):  # from vLLM's own calls
                warnings.simplefilter("ignore", category)
            grow_segments(self.device, allowed=False)
            self._llm = LLM(**arguments(setup, config, self.limits))
            # vLLM switches it off around the memory that sleeps.
            grow_segments(self.device)
            if self.on_cpu and config.model_type in CAUSAL_ON_CPU:
                self.limits.pop("images", None)
            self._shim = VLLMShim(self._llm, self.names, self.draft_names, self.adapters)
            # With hundreds of banned ids, vLLM would build a list for each request in each step.
            self._num_ids, _ = without_padding(
                Truncation(banned=self.vocabulary.unknown_token_ids), self.vocabulary.size
            )
            if self._num_ids < self.vocabulary.size:
                self._shim.limit_vocabulary(self._num_ids)
            runner_v2 = self._llm.llm_engine.vllm_config.use_v2_model_runner
            eager = self.on_cpu and self._llm.llm_engine.model_config.enforce_eager
            if self.on_cpu:
                sampler = self._shim.worker.model_runner.sampler
                replace_slow_operations(self._shim.model, sampler, eager=eager)
            # Model runner V1 draws from torch's generators even if all requests have a seed. V2
            # never does: its kernels compute random numbers from the seeds.
            self._generators_kept: Callable[[], AbstractContextManager] = (
                nullcontext if runner_v2 else torch_state_kept(self.device)
            )
            # Compiling functions of vLLM, such as the routing of some mixtures, takes seconds on a
            # CPU and needs a C++ compiler, so it is off there unless it was asked for.
            self._stance: Callable[[], AbstractContextManager] = (
                partial(torch.compiler.set_stance, "force_eager") if eager else nullcontext
            )
            self._keeps_draft = self._shim.draft_model is not None and self.draft_names is None
            """True if no stream brings the model that drafts, so that it must survive a sleep."""
            # vLLM keeps the chosen experts of whole blocks only.
            shares = self.on_cpu and not setup.section.router_replay
            self._shares_last_blocks = shares and share_last_blocks(self._shim.cache)
            self._held: dict[str, tuple[EngineCoreRequest, int]] = {}
            """Name of a sample -> request and seed, to submit after one step, when the first sample
            of each request has computed the prompt."""
            self._ended: dict[int, dict[int, Completion]] = {}
            """Key of a request that runs -> the samples that have ended."""
            self._requests: dict[int, Request] = {}
            self._complete: list[int] = []
            """Keys of requests whose last sample ended in a step that a load has finished."""
            self._num_loads = 0
            """How many loads had requests running: the salt of what vLLM's caches contain."""

            speculates = setup.section.speculative != "none"
            with self._stance():
                self._speculation = (
                    Speculation(self._llm, setup.section, setup.axis) if speculates else None
                )

            self.reset_cache()

        return self._shim.weights.unknown

    @property
    def takes_local_experts(self) -> bool:
        return self.verify_round is not None and self._shim.weights.divides_experts

    @classmethod
    def adapter_problem(
        cls, setup: EngineSetup, names: PublishedNames, media: Collection[str]
    ) -> str | None:
        config = load_config(setup.model_path, trust_remote_code=setup.trust_remote_code)
        return slots_problem(setup, names, config.architectures or [], media)

    def prompts_at_once(self, n: int) -> int:
        return self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs // n

    def reset_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not clear its prefix cache: requests are still in it")
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        if self._speculation:
            self._speculation.renew()

    def _expanded(self, request: Request) -> Expanded:
        self.reader.heard(request.multi_modal.get("audios", []))
        prompt = self._shim.with_media(request.token_ids, request.multi_modal)
        return Expanded(prompt["prompt_token_ids"], prompt)

    def _add(self, key: int, request: Request) -> None:
        """Submit a request for each sample.

        The first one computes the prompt, and the others find it in the cache.
        """
        if request.sampling.stop:
            self._shim.tokenizer = self.vocabulary.tokenizer
        parameters = self._parameters(request.sampling, request.seeds[0])
        salt = str(self._num_loads)  # so that only blocks of the current weights are shared
        if request.expanded:
            prompt = _salted(request.expanded, salt)
        else:
            prompt = tokens_input(request.token_ids, cache_salt=salt)
        prepared = self._shim.prepare(prompt, parameters)

        for sample, seed in enumerate(request.seeds[: request.sampling.num_draws]):
            name = f"{key}/{sample}"
            if sample and self._shares_last_blocks:
                self._held[name] = prepared, seed
            else:
                self._shim.submit(name, prepared, seed)
            if self._speculation:
                group = f"{key}" if request.group is None else f"group {request.group}"
                self._speculation.begin(name, group, len(request.prompt))

        self._ended[key] = {}
        self._requests[key] = request

    def _step(self) -> Iterator[tuple[int, list[Completion]]]:
        with self._generators_kept(), self._stance():
            ended = self._shim.step()
        self._submit_held()
        if self._speculation:
            self._speculation.count_step()
        self._take(ended)
        while self._complete:
            key = self._complete.pop(0)
            yield key, self._completions(key)

    def _take(self, ended: dict[str, Completion]) -> None:
        """Take samples that have ended; a request is complete with the last of them."""
        for name, completion in ended.items():
            key, sample = map(int, name.split("/"))
            self._ended[key][sample] = completion
            if self._speculation:
                self._speculation.end(name, self._requests[key].prompt + completion.token_ids)
            if len(self._ended[key]) == self._requests[key].sampling.num_draws:
                self._complete.append(key)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self._generators_kept(), self._stance():
            self._take(self._shim.finish_step())
        yield

    def _num_sampled(self, key: int) -> list[int]:
        sampling = self._requests[key].sampling
        counts = []
        for sample in range(sampling.num_draws):
            name = f"{key}/{sample}"
            if ended := self._ended[key].get(sample):
                counts.append(len(ended.token_ids))
            else:
                counts.append(0 if name in self._held else self._shim.num_sampled(name))
        return sampling.of_samples(counts)

    def _leave_cache(self) -> None:
        """Give later requests another salt than earlier ones.

        Drafts go on too: a model that was switched off has not read the samples that run, so that
        it stays off, and text of earlier weights is forgotten with its requests.

        With adapters a request goes on with the ones that it has. vLLM shares no blocks between
        adapters, so salts stay.
        """
        if self.keeps_policy:
            return
        self._submit_held()  # their request has the salt of before
        self._num_loads += 1
        self._shim.leave_cache(str(self._num_loads))

    def _submit_held(self) -> None:
        for name, (request, seed) in self._held.items():
            self._shim.submit(name, request, seed)
        self._held.clear()

    def _abort(self, key: int) -> list[Completion]:
        self._submit_held()
        samples = range(self._requests[key].sampling.num_draws)
        running = [f"{key}/{sample}" for sample in samples if sample not in self._ended[key]]
        self._take({name: self._shim.abort(name) for name in running})
        self._complete.remove(key)
        return self._completions(key)

    def _parameters(self, sampling: Sampling, seed: int) -> SamplingParams:
        banned = [token for token in sampling.banned_token_ids if token < self._num_ids]
        parameters = SamplingParams(
            seed=seed,
            max_tokens=sampling.max_tokens,
            temperature=min(sampling.temperature, 1.0),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            # This is about the end token that vLLM knows for some models. All end tokens are in
            # stop_token_ids.
            ignore_eos=True,
            stop_token_ids=sorted(self.vocabulary.end_token_ids | set(sampling.stop_token_ids)),
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            logprobs=0,  # of the sampled token only
            skip_clone=True,  # a clone would be checked again
        )

        if self._speculation:  # vLLM supports no biases together with drafts
            parameters._bad_words_token_ids = [[token] for token in banned]
        else:
            parameters.logit_bias = dict.fromkeys(banned, -math.inf) or None

        # vLLM's check allows at most 2, but any value works.
        parameters.temperature = sampling.temperature
        return parameters

    def _completions(self, key: int) -> list[Completion]:
        """Return the completions of a request, and forget it."""
        sampling = self._requests.pop(key).sampling
        completions = [completion for _, completion in sorted(self._ended.pop(key).items())]
        # A greedy response is computed once, whatever the number of samples.
        return sampling.of_samples(completions)

    def _load_weights(self, named_tensors: Iterator[NamedTensor]) -> None:
        with self._fatal("load_weights"), torch.no_grad():
            if self.adapters is None:
                self._load_base(named_tensors)
            else:
                self._load_adapters(named_tensors, self.adapters)

    def _load_adapters(self, named_tensors: Iterator[NamedTensor], adapters: Adapters) -> None:
        """Load adapters, and the other weights if the stream brings them."""
        tensors: dict[str, torch.Tensor] = {}
        others = _without_adapters(named_tensors, adapters, tensors)
        if not self.has_base:
            self._load_base(others)
        else:
            for _ in others:
                pass  # all of them are adapters
        # A stream that broke off has not brought all of them, and load_weights() reports it.
        if tensors.keys() == adapters.shapes.keys():
            self._shim.load_adapters(tensors)

    def _load_base(self, named_tensors: Iterator[NamedTensor]) -> None:
        """Load all weights but adapters."""
        try:
            if self.draft_names is None:
                self._shim.reload_weights(named_tensors, direct=self.addresses_verified)
            else:
                self._load_with_draft(named_tensors)
        except (ValueError, KeyError) as error:
            if not (unknown := self._shim.weights.unknown):
                raise
            message = self.names.unknown_weights_message(unknown, "vllm")
            raise ValueError(f"{message}. vLLM's message: {error!s:.300}") from error

    def _load_with_draft(self, named_tensors: Iterator[NamedTensor]) -> None:
        """Load the weights of both models from one stream; a prefix marks the draft's."""
        for is_draft, tensors in groupby(named_tensors, lambda named: named[0].startswith(DRAFT)):
            if is_draft:
                self._shim.reload_draft_weights(
                    (name.removeprefix(DRAFT), tensor) for name, tensor in tensors
                )
            else:
                self._shim.reload_weights(tensors, direct=self.addresses_verified)

    def _fingerprints(self, dtype: torch.dtype, round: int | None) -> Fingerprints:
        return self._shim.weights.fingerprints(dtype, round)

    def _engine_fingerprints(self, prints: Fingerprints) -> tuple[torch.Tensor, torch.Tensor]:
        with self._stance():
            self._shim.weights.add_to(prints)
        return prints.numbers(self.device)

    def _adapter_fingerprints(self, prints: Fingerprints) -> tuple[torch.Tensor, torch.Tensor]:
        self._shim.slots.add_to(prints)
        return prints.numbers(self.device)

    def _num_cached(self) -> int:
        return len(self._shim.cache.block_pool.cached_block_hash_to_block)

    def _module_outputs(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        probe = Probe(len(token_ids))
        logits = []
        hook = logits_processor(self._shim.model).register_forward_hook(
            lambda module, inputs, output: logits.append(output)
        )

        with hook, probe.attached(self._shim.model):
            self._compute(token_ids)

        return probe.recorded(logits[0][-1])

    def _sleep(self, level: int) -> None:
        if level == 2 and self._keeps_draft:
            self._shim.keep_draft_weights()
        if not self.on_cpu:
            self._llm.sleep(level)
        elif level == 2:
            for model in filter(None, (self._shim.model, self._shim.draft_model)):
                destroy_weights(model)

    def _wake(self, half: Half) -> None:
        if not self.on_cpu:
            self._llm.wake_up(tags=[half])
            if half == "kv_cache":
                self._shim.zero_cache()
        if half == "weights" and self._keeps_draft:
            self._shim.restore_draft_weights()

    def _close(self) -> None:
        del self._speculation
        self._shim.shutdown()
        del self._llm, self._shim
        gc.collect()
        release_cached_memory(self.device)


def _salted(expanded: Expanded, salt: str) -> MultiModalInput:
    """Return a prompt with media for vLLM, with a salt for what vLLM's caches contain."""
    prompt = expanded.features
    # The hashes name the outputs of encoders, which vLLM caches too.
    items = prompt["mm_hashes"].items()
    hashes = {medium: [f"{salt} {each}" for each in found] for medium, found in items}
    salted = {"prompt_token_ids": expanded.token_ids, "cache_salt": salt, "mm_hashes": hashes}
    return {**prompt, **salted}


def _without_adapters(
    named_tensors: Iterator[NamedTensor], adapters: Adapters, tensors: dict[str, torch.Tensor]
) -> Iterator[NamedTensor]:
    """Yield what is not an adapter, and put adapters into `tensors`."""
    for name, tensor in named_tensors:
        if name in adapters.shapes:
            tensors[name] = tensor
        else:
            yield name, tensor
        # Otherwise the next tensor would be gathered beside this one.
        del tensor
