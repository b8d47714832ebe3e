"""Methods of a policy for loops of your own: padded batches, generation, phases, and files.

A run of train_ppo calls none of them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.roles.padded import flatten_padded
from lightrft.core.batch import Batch, padded
from lightrft.core.samples import Completion
from lightrft.engine.requests import Sampling
from lightrft.models.heads import Actor, Likeliest
from lightrft.models.logits.truncation import ALL, Truncation
from lightrft.models.lora import fold_adapters, plain_name
from lightrft.models.weight_sync.stream import hf_parameters, persistent_buffers, unwrap
from lightrft.strategy.phases import Phase
from lightrft.strategy.profiler import Profiler
from lightrft.strategy.prompt_reader import PromptReader
from lightrft.strategy.strategy import StrategyBase

EVERYTHING = 2**62
PROFILES = "profile"


class PolicyMethods:
    """Methods that Policy has for loops of your own.

    Batches are mappings with `input_ids` [B, S] and `input_lengths` [B], right-padded; see
    DistributedRole.
    """

    strategy: StrategyBase
    actor: Actor
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    tokenizer: Tokenizer | None
    temperature: float
    truncation: Truncation
    width_multiple: int
    refuse_open_step: Callable[[], None]
    _answer: Callable[..., Tensor]
    _token_logprobs: Callable[[Actor, Batch], Tensor]
    _reference: Callable[[], AbstractContextManager[Actor]]

    _generations = 0
    """Number of calls of generate()."""
    _version_before_refit: int | None = None
    _profiler: Profiler | None = None

    # -- log-probs

    def get_logprobs(self, batch: Mapping[str, Any], mbs: int | None = None) -> dict[str, Tensor]:
        """Return `logprobs` [B, S] float32: log p of every token given the tokens before it.

        Column 0 and the padding are 0.
        """
        values = self._answer(batch, lambda micro: self._token_logprobs(self.actor, micro), mbs)
        return {"logprobs": values}

    def get_reference_logprobs(
        self, batch: Mapping[str, Any], mbs: int | None = None
    ) -> dict[str, Tensor]:
        """Return `reference_logprobs` [B, S]: the same under the reference model."""
        with self._reference() as reference:
            values = self._answer(
                batch, lambda micro: self._token_logprobs(reference, micro), mbs, reference
            )
        return {"reference_logprobs": values}

    def get_top_logprobs(
        self, batch: Mapping[str, Any], k: int, mbs: int | None = None
    ) -> dict[str, Tensor]:
        """Return the k most likely next tokens after each token.

        `top_logprobs` [B, S, k] is float32 and `top_ids` [B, S, k] int64. The most likely comes
        first; log-probs are at the policy's temperature, over the whole vocabulary. Unlike in
        get_logprobs(), column t is about the token after column t; the padding is 0.
        """

        def ask(part: Batch) -> Tensor:
            logprobs, ids = self.actor(part, self.temperature, ALL, Likeliest(k, after_all=True))
            return torch.cat([logprobs, ids.float()], dim=1)  # float32 is exact for ids below 2^24

        top = self._answer(batch, ask, mbs)
        top = top.view(*top.shape[:2], 2 * k)  # also if no rank has rows
        return {"top_logprobs": top[..., :k], "top_ids": top[..., k:].long()}

    # -- generation

    def generate(self, batch: Mapping[str, Any], greedy: bool = False) -> dict[str, Tensor]:
        """Generate one response to each prompt of `input_ids`; every call draws anew.

        A response has at most --generate_max_len tokens. Returns `output_ids` [B, S_out]: prompt
        and response, then the padding token. S_out is the same on all ranks. `generation_lengths`
        [B] has the lengths of responses, and `unpadded_sequence_lengths` [B] the lengths of prompt
        and response. `logprobs` [B, S_out] float32 has the log-probs of the response's tokens as
        sampled, 0 elsewhere. Greedy log-probs are at temperature 1. Requires
        prepare_for_generation() first.
        """
        phase = self.strategy.phase
        if phase is not Phase.GENERATE:
            raise RuntimeError(
                f"generate() in phase {phase.value}: call prepare_for_generation() first"
            )

        flat = flatten_padded(batch, self.strategy.mesh.data).batch
        prompts = [ids.tolist() for ids in flat.input_ids.split(flat.lengths.tolist())]
        self._generations += 1
        # The seed counts calls: each draws anew, and a resumed run continues the series.
        section = self.strategy.config.rollout
        sampling = Sampling(
            max_tokens=section.generate_max_len,
            temperature=0.0 if greedy else self.temperature,
            stop=tuple(section.stop),
            stop_token_ids=tuple(section.stop_token_ids),
            top_p=self.truncation.top_p,
            top_k=self.truncation.top_k,
            min_p=self.truncation.min_p,
            banned_token_ids=self.truncation.banned,
            seed=self.strategy.seed * 1_000_003 + self._generations,
        )
        reader = PromptReader(self.strategy.engine.vocabulary, special_tokens=False)
        requests = [reader.request(prompt, {}) for prompt in prompts]
        completions = self.strategy.host.generate(sampling, requests)

        return self._generated(prompts, [samples[0] for samples in completions])

    def _generated(
        self, prompts: list[list[int]], completions: list[Completion]
    ) -> dict[str, Tensor]:
        new = torch.tensor([len(each.token_ids) for each in completions], dtype=torch.int64)
        lengths = new + torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        # Results have one width on all ranks.
        longest = torch.tensor(max(lengths.tolist(), default=0), device=self.strategy.device)
        longest = int(self.strategy.data.max(longest))
        width = -(-longest // self.width_multiple) * self.width_multiple
        pad = self.tokenizer.pad_token_id if self.tokenizer is not None else None
        rows = list(zip(prompts, completions, strict=True))
        ids = [token for prompt, each in rows for token in (*prompt, *each.token_ids)]
        ids = torch.tensor(ids, dtype=torch.int64)
        logprobs = torch.tensor(
            [value for prompt, each in rows for value in (*[0.0] * len(prompt), *each.logprobs)]
        )

        return {
            "output_ids": padded(ids, lengths, width, fill=pad or 0),
            "generation_lengths": new,
            "unpadded_sequence_lengths": lengths,
            "logprobs": padded(logprobs, lengths, width),
        }

    # -- phases

    def prepare_for_generation(self) -> None:
        """Wake the engine with the actor's newest weights.

        They are streamed unless that was done since offload_before_refit().
        """
        refitted = (
            self._version_before_refit is not None
            and self.strategy.weight_version > self._version_before_refit
        )
        phase = self.strategy.phase
        stale = phase in (Phase.TRAIN, Phase.LOGPROB) or (phase is Phase.REFIT and not refitted)
        self.strategy.wakeup_inference_engine(self.actor if stale else None)

    def prepare_for_training(self) -> None:
        """Bring the actor and its optimizer to the device.

        Raises PhaseError during generation: finish_generation() first.
        """
        self.strategy.enter(Phase.TRAIN, self.actor, self.optimizer)

    def prepare_for_logprobs(self) -> None:
        """Bring the actor to the device.

        Raises PhaseError during generation: finish_generation() first.
        """
        self.strategy.enter(Phase.LOGPROB, self.actor)

    def finish_generation(self) -> None:
        """Put the engine to sleep, if it is allowed to, so that models can return to the device."""
        self.strategy.maybe_sleep_inference_engine()

    def finish_training(self) -> None:
        """Move actor and optimizer off the device with --offload_idle."""
        self.refuse_open_step()
        self.strategy.enter(Phase.LOGPROB)

    def finish_inference(self) -> None:
        """Move the model that was used off the device with --offload_idle."""
        self.strategy.enter(Phase.LOGPROB)

    def offload_before_refit(self) -> None:
        """Move the optimizer off the device, and bring the actor there for the weight stream."""
        self._version_before_refit = self.strategy.weight_version
        self.strategy.enter(Phase.REFIT, self.actor)
        if self.optimizer is not None:
            self.strategy.maybe_offload_optimizer(self.optimizer)

    def offload_after_refit(self) -> None:
        """Move the actor off the device too, which frees memory for the engine's cache."""
        self.strategy.enter(Phase.REFIT)
        self.strategy.offload_model(self.actor)

    def refit_info(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return Hugging Face name -> full shape and dtype of the tensors of stream_weights().

        They are in the order of the stream.
        """
        full_shape = self.strategy.full_shape
        shapes = ((name, full_shape(parameter)) for name, parameter in hf_parameters(self.actor))
        learned = {
            name: (shape, self.strategy.dtype)
            for name, shape in fold_adapters(shapes, lambda _, base, *adapter: base)
        }
        buffers = persistent_buffers(unwrap(self.actor))

        return learned | {
            plain_name(name): (buffer.shape, buffer.dtype) for name, buffer in buffers
        }

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over (Hugging Face name, full tensor) of the actor.

        All ranks consume it to the end.
        """
        return self.strategy.full_params(self.actor)

    # -- files

    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
    ) -> None:
        """Save the actor as a Hugging Face folder, and optionally two more folders.

        `optimizer_path` gets all that a run needs to continue (weights, optimizer, schedule, random
        states), for strategy.load_ckpt(actor, parent, name, items={"policy": policy}).
        `tokenizer_path` gets the tokenizer.
        """
        self.strategy.save_model(self.actor, None, weights_path)
        if optimizer_path is not None:
            # Folders beside it belong to the caller, so the limits let none be removed.
            path = Path(optimizer_path)
            self.strategy.save_ckpt(
                self.actor,
                path.parent,
                path.name,
                max_num=EVERYTHING,
                max_mem=EVERYTHING,
                save_latest=False,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                items={"policy": self},
            )

        if tokenizer_path is not None:
            if self.tokenizer is None:
                raise ValueError("this policy has no tokenizer to save: create it with a tokenizer")
            if self.strategy.is_rank_0():
                self.tokenizer.save_pretrained(tokenizer_path)
            self.strategy.mesh.world.barrier()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of calls of generate(): a resumed run continues from it."""
        return {"generations": self._generations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generations = state["generations"]

    def start_profiling(self, folder: str | Path) -> None:
        """Record what this rank computes until stop_profiling()."""
        if self._profiler is not None:
            raise RuntimeError("profiling is already active: call stop_profiling() first")
        self._profiler = Profiler(Path(folder), self.strategy.get_rank())

    def stop_profiling(self) -> Path:
        """Write the record as a Chrome trace and return its path."""
        if self._profiler is None:
            raise RuntimeError("profiling is not active: call start_profiling() first")
        profiler = self._profiler
        self._profiler = None
        return profiler.stop()

    def shutdown(self) -> None:
        """End profiling, the engine, and the process group if the strategy made it.

        May be called at any time.
        """
        if self._profiler is not None:
            self.stop_profiling()
        self.strategy.close()

    # -- NeMo-RL's names of these methods

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        return self.get_reference_logprobs(data, micro_batch_size)

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        """Return `topk_logits` and `topk_indices` [B, S, k].

        The logits are normalised, so they are log-probs. Unnormalised logits differ by a constant
        at each position, so they have the same softmax.
        """
        top = self.get_top_logprobs(data, k, micro_batch_size)
        return {"topk_logits": top["top_logprobs"], "topk_indices": top["top_ids"]}

    prepare_for_lp_inference = prepare_for_logprobs
    prepare_refit_info = refit_info
    stop_gpu_profiling = stop_profiling

    def start_gpu_profiling(self, folder: str | Path = PROFILES) -> None:
        self.start_profiling(folder)
