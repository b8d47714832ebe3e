"""Access to SGLang's internals in this process; they may change between versions."""

import asyncio
import atexit
import logging
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang.srt.entrypoints.engine import Engine as SGLang
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from lightrft.core.engine import Request
from lightrft.engine.base import EngineError
from lightrft.engine.sglang import lifetime
from lightrft.engine.sglang.scheduler import answer_question, run_scheduler
from lightrft.models.weight_sync.names import NamedTensor

MOMENT = 0.02
"""Longest time of one step; no request may end in it."""
BETWEEN_LOOKS = 0.001
"""Seconds between looks at SGLang's results."""
IDLE_SECONDS = 60
"""How long SGLang may take to become idle after the last result."""


class SGLangShim:
    """SGLang's engine and processes, and every access to internals that may change."""

    def __init__(self, arguments: dict[str, Any]):
        if arguments["device"] != "cpu":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            # This makes device-memory handles identify devices as SGLang's processes do.
            monkey_patch_torch_reductions()
        # SGLang logs our handler as an error.
        logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)
        sleeps = arguments.get("enable_memory_saver", False)
        with lifetime.contain_start(arguments["tp_size"], arguments["dtype"], sleeps=sleeps):
            self.engine = _SGLang(**arguments, custom_sigquit_handler=lifetime.raise_engine_error)
            self.engine.tokenizer_manager.signal_handler_class = lifetime.NoHandlers
            # The first call replaces the signal handlers, and contain_start() restores them.
            self.flush_cache()
            lifetime.unlink_load_files(self._processes())  # now, so that a killed run leaves none
        self.engine.loop = lifetime.Loop(self.engine.loop)
        signal.signal(signal.SIGQUIT, self.engine.loop.on_death)
        # SGLang's own shutdown kills every child of this process, including the trainer's.
        atexit.unregister(self.engine.shutdown)
        atexit.register(self.shutdown)

    async def generate(
        self, names: list[str], entries: list[tuple[Any, dict[str, Any], str | None]], salt: str
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Start requests with one message; yield index and intermediate or final result of each.

        An entry of `entries` is an object with the request, then parameters and processor. Only
        requests of the same salt share what is in the cache.
        """
        requests: list[Request] = [running.request for running, _, _ in entries]
        images = [
            [request.expanded.features | {"format": "processor_output"}] if request.expanded else []
            for request in requests
        ]

        answers = await self.engine.async_generate(
            input_ids=[request.prompt for request in requests],
            sampling_params=[parameters for _, parameters, _ in entries],
            image_data=images if any(images) else None,
            custom_logit_processor=[processor for _, _, processor in entries],
            return_logprob=True,
            stream=True,
            rid=names,
            cache_salt=salt,
        )
        async for answer in answers:
            yield answer["index"], answer

    def begin(self, coroutine: Coroutine) -> asyncio.Task:
        """Return a task of SGLang's event loop; it runs in work_until() only."""
        return self.engine.loop.task(coroutine)

    def work_until(self, reached: Callable[[], bool], tasks: set[asyncio.Task]) -> None:
        """Run the event loop until a condition holds or a task ends, for at most MOMENT seconds."""

        async def wait() -> None:
            end = time.monotonic() + MOMENT
            while (
                not reached() and not any(task.done() for task in tasks) and time.monotonic() < end
            ):
                await asyncio.sleep(BETWEEN_LOOKS)

        self.engine.loop.run_until_complete(wait())

    def abort(self, name: str) -> None:
        """Abort the request of this name; the final result follows."""
        self.engine.tokenizer_manager.abort_request(rid=name)

    async def resumed(self) -> None:
        """Wait until SGLang is not paused."""
        while self.engine.tokenizer_manager.is_pause:
            await asyncio.sleep(BETWEEN_LOOKS)

    def pause(self, salt: str) -> dict[str, int]:
        """Stop SGLang between two steps; return how many tokens each of the requests there has.

        Requests without a token get another salt. Requests on the way to SGLang, and those with a
        final result on the way here, are missing.
        """
        manager = self.engine.tokenizer_manager
        if not manager.is_pause:
            # Otherwise SGLang would load weights only when all requests have ended.
            pause = manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
            self.engine.loop.run_until_complete(pause)
        return self.ask("pause", salt=salt)[0]

    def resume_steps(self) -> None:
        going_on = ContinueGenerationReqInput(torch_empty_cache=False)
        manager = self.engine.tokenizer_manager
        self.engine.loop.run_until_complete(manager.continue_generation(going_on))

    def begin_weight_update(self) -> None:
        _checked(self.engine.begin_weight_update())

    def end_weight_update(self) -> None:
        _checked(self.engine.end_weight_update())

    def update_weights(self, payloads: list[str]) -> None:
        """Update weights with one payload for each tensor-parallel rank."""
        _checked(
            self.engine.update_weights_from_tensor(
                payloads, load_format="flattened_bucket", flush_cache=False
            )
        )

    def flush_cache(self) -> None:
        """Drop the cache, retrying until the scheduler is idle, shortly after the last result."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"SGLang was not idle for {IDLE_SECONDS} s: its cache cannot be cleared"
                )
            time.sleep(0.01)

    def release(self, tags: list[str]) -> None:
        """Release memory by tags.

        The scheduler would die if it were not idle, or if a tag had been released before.
        """
        self.flush_cache()
        self.engine.release_memory_occupation(tags=tags)

    def resume(self, tags: list[str]) -> None:
        self.engine.resume_memory_occupation(tags=tags)

    def ask(self, question: str, **arguments: Any) -> list[Any]:
        """Ask SGLang's processes one of QUESTIONS; return the results by tensor-parallel rank."""
        with tempfile.TemporaryDirectory() as folder:
            torch.save((question, arguments), Path(folder, "question"))
            # collective_rpc() transfers plain values only, and no results.
            self.engine.collective_rpc(answer_question.__name__, folder=folder)
            ranks = range(self.engine.server_args.tp_size)
            return [torch.load(Path(folder, str(rank))) for rank in ranks]

    def shutdown(self) -> None:
        """End SGLang's own processes only."""
        self.engine.tokenizer_manager._subprocess_watchdog.stop()
        atexit.unregister(self.shutdown)
        lifetime.kill(self._processes())
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    def _processes(self) -> set[psutil.Process]:
        children = self.engine.get_all_child_pids()
        return {psutil.Process(child) for child in children if psutil.pid_exists(child)}

    @staticmethod
    def payload(bucket: list[NamedTensor]) -> tuple[Any, str]:
        """Return an object to keep until the update is done, and the payload that refers to it."""
        flat = FlattenedTensorBucket(
            named_tensors=[(name, tensor.detach()) for name, tensor in bucket]
        )
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        return content, MultiprocessingSerializer.serialize(content, output_str=True)


class _SGLang(SGLang):
    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list, list]:
        """Launch no detokenizer: input and output are token ids."""
        return [], []


def _checked(answer: tuple[bool, str]) -> None:
    """Raise EngineError for a refused update; SGLang raises no error and keeps the old weights."""
    success, message = answer
    if not success:
        raise EngineError(f"SGLang reported an error: {message}")
