"""SGLang's own engine: everything of it, in this process, that another version may change."""

import atexit
import logging
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang.srt.entrypoints.engine import Engine as SGLang
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from lightrft.engine.base import EngineError
from lightrft.engine.requests import Request
from lightrft.engine.sglang.lifetime import Loop, NoHandlers, contained, died, kill, unlink_load_files
from lightrft.engine.sglang.scheduler import answer_question, run_scheduler
from lightrft.weight_sync.stream import NamedTensor

IDLE_SECONDS = 60
"""So long may SGLang take to become idle after its last answer."""


class SGLangShim:
    """SGLang's engine with its processes, and everything of it that another version may change."""

    def __init__(self, arguments: dict[str, Any]):
        if arguments["device"] != "cpu":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # handles of device memory then name devices as SGLang's processes do
        logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)  # it announces our handler as an error
        with contained(arguments["tp_size"]):
            self.engine = _SGLang(**arguments, custom_sigquit_handler=died)
            self.engine.tokenizer_manager.signal_handler_class = NoHandlers
            self.flush_cache()  # its first call takes the handlers of signals, which are given back here
            unlink_load_files(self._processes())  # now, so that a killed run leaves none
        self.engine.loop = Loop(self.engine.loop)
        signal.signal(signal.SIGQUIT, self.engine.loop.on_death)
        atexit.unregister(self.engine.shutdown)  # it kills every child of this process, the trainer's own among them
        atexit.register(self.shutdown)

    def generate(
        self, requests: list[Request], parameters: list[dict[str, Any]], processors: list[str | None]
    ) -> Iterator[dict[str, Any]]:
        """What is known of each request, now and then, with its `index`, and once when it ends. One message starts them all."""
        images = [[each.expanded.features | {"format": "processor_output"}] if each.expanded else [] for each in requests]
        return self.engine.generate(input_ids=[each.prompt for each in requests], sampling_params=parameters,
                                    image_data=images if any(images) else None, custom_logit_processor=processors,
                                    return_logprob=True, stream=True)

    def abort(self, answer: dict[str, Any]) -> None:
        """Ends the request that is answered; its last answer follows."""
        self.engine.tokenizer_manager.abort_request(rid=answer["meta_info"]["id"])

    def begin_weight_update(self) -> None:
        _checked(self.engine.begin_weight_update())

    def end_weight_update(self) -> None:
        _checked(self.engine.end_weight_update())

    def update_weights(self, payloads: list[str]) -> None:
        """One payload for each tensor-parallel rank."""
        _checked(self.engine.update_weights_from_tensor(payloads, load_format="flattened_bucket", flush_cache=False))

    def flush_cache(self) -> None:
        """Waits until the scheduler has nothing to do: it answers a moment before it is idle."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise EngineError(f"SGLang was not idle for {IDLE_SECONDS} s: its cache cannot be dropped")
            time.sleep(0.01)

    def release(self, tags: list[str]) -> None:
        """An idle scheduler is needed, and none of the tags released before: it would die."""
        self.flush_cache()
        self.engine.release_memory_occupation(tags=tags)

    def resume(self, tags: list[str]) -> None:
        self.engine.resume_memory_occupation(tags=tags)

    def destroy_weights(self) -> None:
        """Stands for a sleep of level 2 on a CPU, where SGLang keeps all: what is computed without a new stream is NaN."""
        self.ask("fill_with_nan")

    def ask(self, question: str, **arguments: Any) -> list[Any]:
        """The answers of SGLang's processes to one of QUESTIONS, by tensor-parallel rank."""
        with tempfile.TemporaryDirectory() as folder:
            torch.save((question, arguments), Path(folder, "question"))
            self.engine.collective_rpc(answer_question.__name__, folder=folder)  # it brings only plain values, and nothing back
            return [torch.load(Path(folder, str(rank))) for rank in range(self.engine.server_args.tp_size)]

    def shutdown(self) -> None:
        """Its own processes only."""
        self.engine.tokenizer_manager._subprocess_watchdog.stop()
        atexit.unregister(self.shutdown)
        kill(self._processes())
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    def _processes(self) -> set[psutil.Process]:
        return {psutil.Process(pid) for pid in self.engine.get_all_child_pids() if psutil.pid_exists(pid)}

    @staticmethod
    def payload(bucket: list[NamedTensor]) -> tuple[Any, str]:
        """What must be kept until the update is done, as the payload refers to it, and the payload."""
        flat = FlattenedTensorBucket(named_tensors=[(name, tensor.detach()) for name, tensor in bucket])
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        return content, MultiprocessingSerializer.serialize(content, output_str=True)


class _SGLang(SGLang):
    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list, list]:
        """None: it is given token ids and gives token ids."""
        return [], []


def _checked(answer: tuple[bool, str]) -> None:
    """SGLang does not raise: an update that was refused leaves the old weights."""
    success, message = answer
    if not success:
        raise EngineError(f"SGLang refused: {message}")
