"""Adapter of SGLang: the first rank of an axis calls it and broadcasts the results."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sglang
import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.core.engine import Request
from lightrft.core.samples import Completion
from lightrft.engine.base import EngineError, EngineSetup, Half
from lightrft.engine.sglang.arguments import arguments
from lightrft.engine.sglang.samples import Samples
from lightrft.engine.sglang.shim import SGLangShim
from lightrft.engine.start import LibraryEngine
from lightrft.models.parallel.device import current_device
from lightrft.models.weight_sync.fused_layout import engine_names
from lightrft.models.weight_sync.names import NamedTensor
from lightrft.models.weight_sync.stream import bucket_limit, buckets
from lightrft.models.weight_sync.verify import Fingerprints

LATER_SUMMED = ("o_proj", "mlp")
"""Modules of a model whose outputs are partial sums on each tensor-parallel rank."""

TEXT_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families whose class without a tower reads names without `language_model` only."""
SEEN_OTHERWISE = ("gemma3",)
"""Families whose images SGLang processes differently from transformers without a warning.

The vision tower has another GELU, and except with Triton no token of an image attends to a later
one."""


class SGLangEngine(LibraryEngine):
    """SGLang engine that draws each sample from a separate seed.

    Samples are thereby reproducible whatever the batch, up to rounding in kernels that depends on
    the batch.
    """

    media = ("images",)

    def __init__(self, setup: EngineSetup):
        self._asleep: set[str] = set()
        self._shim: SGLangShim | None = None
        self._samples: Samples | None = None
        super().__init__("sglang", sglang.__version__, setup)
        self.reader.media_alone = True
        self.bucket_mb = setup.section.weight_sync_bucket_mb

    def _start(self, setup: EngineSetup, config: PretrainedConfig) -> list[str]:
        multiprocessing.current_process().authkey = self.axis.broadcast(
            bytes(multiprocessing.current_process().authkey)
        )
        options = arguments(setup, config)
        self._is_text_alone = config.model_type in TEXT_ALONE
        addresses = {name: self._read(given) for name, given in engine_names(self.names).items()}
        if config.model_type in SEEN_OTHERWISE:
            self.limits.pop("images", None)
        unknown = self._on_first_rank(lambda: self._launch(options, addresses))
        self._addresses = {name: addresses[name] for name in addresses if name not in unknown}
        return unknown

    def _launch(self, options: dict[str, Any], addresses: dict[str, str]) -> list[str]:
        self._shim = SGLangShim(options)
        self._samples = Samples(self._shim, self.vocabulary)
        return self._shim.ask("unknown_weights", addresses=addresses, shapes=self.names.shapes)[0]

    def prompts_at_once(self, n: int) -> int:
        return self._ask("num_slots")[0] // n

    def reset_cache(self) -> None:
        with self._fatal("reset_cache"):
            self._on_first_rank(lambda: self._shim.flush_cache())
            self._leave_cache()

    def _add(self, key: int, request: Request) -> None:
        if self.axis.rank == 0:
            self._samples.add(key, request)

    def _step(self) -> list[tuple[int, list[Completion]]]:
        return self._on_first_rank(lambda: self._samples.step())

    def _abort(self, key: int) -> list[Completion]:
        return self._on_first_rank(lambda: self._samples.abort(key))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._on_first_rank(lambda: self._samples.pause())
        yield
        self._on_first_rank(lambda: self._samples.resume())

    def _num_sampled(self, key: int) -> list[int]:
        return self._on_first_rank(lambda: self._samples.num_sampled(key))

    def _leave_cache(self) -> None:
        """Drop the image embeddings; pause() has given later requests another salt."""
        if self.limits:
            self._ask("forget_images")

    def _module_outputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Return Probe.recorded(), with tensor parallelism without outputs that are sharded."""
        self._ask("watch", num_tokens=len(token_ids))
        try:
            self._compute(token_ids)
        finally:
            of_ranks = self._ask("seen")
        return _joined_outputs(of_ranks)

    # -- weights

    def _load_weights(self, named_tensors: Iterator[NamedTensor]) -> None:
        with self._fatal("load_weights"):
            self._on_first_rank(lambda: self._shim.begin_weight_update())
            published = (
                (self._read(name), tensor) for name, tensor in self.names.rename(named_tensors)
            )
            for bucket in buckets(published, self._bucket_bytes()):
                self._send(bucket)
            self._on_first_rank(lambda: self._shim.end_weight_update())

    def _read(self, name: str) -> str:
        """Return a published name as SGLang's model reads it."""
        return name.replace("model.language_model.", "model.") if self._is_text_alone else name

    def _bucket_bytes(self) -> int:
        return bucket_limit(self.bucket_mb, self.axis, current_device())

    def _send(self, bucket: list[NamedTensor]) -> None:
        shared_memory, payload = SGLangShim.payload(bucket)
        payloads = self.axis.gather(payload)
        self._on_first_rank(lambda: self._shim.update_weights(payloads))
        del shared_memory  # not earlier: all ranks' payloads have been read now

    def _fingerprints(self, dtype: torch.dtype, round: int | None) -> Fingerprints:
        return Fingerprints(self.expected, dtype, bits=self._addresses, round=round)

    def _engine_fingerprints(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        """Return the numbers of all weights on the first rank and zeros elsewhere; they add up."""
        weights = {"addresses": self._addresses, "shapes": self.expected}
        numbers = self._ask("held", dtype=prints.dtype, round=prints.round, **weights)
        totals = [sum(of_ranks) for of_ranks in zip(*numbers, strict=True)]
        return tuple(totals) if self.axis.rank == 0 else tuple(map(torch.zeros_like, totals))

    def _num_cached(self) -> int:
        return self._ask("num_cached")[0]

    # -- memory

    def _sleep(self, level: int) -> None:
        """Release memory.

        Level 1 keeps the weights on the device, unless SGLang was started to copy them to the host.
        """
        if level == 2 and self.on_cpu:
            self._ask("destroy_weights")  # SGLang releases nothing then, so they become NaN
        tags = {"kv_cache", "cuda_graph"} | (
            {"weights"} if level == 2 or self.sleep_level == 1 else set()
        )
        self._on_first_rank(lambda: self._shim.release(sorted(tags - self._asleep)))
        self._asleep |= tags

    def _wake(self, half: Half) -> None:
        tags = self._asleep & ({"weights"} if half == "weights" else {"kv_cache", "cuda_graph"})
        if tags:
            self._on_first_rank(lambda: self._shim.resume(sorted(tags)))
        self._asleep -= tags

    def _close(self) -> None:
        if self._shim is not None:
            self._shim.shutdown()

    # -- the first rank and the others

    def _ask(self, question: str, **details: Any) -> list[Any]:
        """Return the answers of all schedulers; see scheduler.py."""
        return self._on_first_rank(lambda: self._shim.ask(question, **details))

    def _on_first_rank(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the first rank; return the result, or raise the error, on all ranks."""
        outcome = None
        failure = None
        if self.axis.rank == 0:
            try:
                outcome = call()
            except Exception as error:
                failure = error

        outcome, problem = self.axis.broadcast(
            (outcome, failure and f"{type(failure).__name__}: {failure}")
        )
        if failure is not None:
            raise failure
        if problem is not None:
            raise EngineError(f"on the first rank of this engine: {problem}")

        return outcome


def _joined_outputs(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the outputs that are equal on all ranks, and sums of what SGLang adds up later."""
    first, *others = of_ranks
    joined = {}
    for name, output in first.items():
        outputs = [output, *(other[name] for other in others)]
        if all(torch.equal(output, other) for other in outputs):
            joined[name] = output
        elif name.rpartition(".")[2] in LATER_SUMMED:
            joined[name] = sum(outputs)
    return joined
