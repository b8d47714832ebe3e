"""Choose the device and the collective backends, and measure memory of accelerator and host."""

import math
import os
import platform
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def current_device() -> torch.device:
    """Return this process's accelerator, or the CPU if there is none."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator().type, local_rank())
    return torch.device("cpu")


def device_name() -> str:
    """Return the name of this process's GPU, or an empty string without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def has_bf16() -> bool:
    """Return True if this process has a GPU that multiplies bfloat16 matrices at full speed.

    NVIDIA's have from compute capability 8.0 (Ampere) on.
    """
    return compute_capability() >= (8, 0)


def compute_capability() -> tuple[int, int]:
    """Return the compute capability of this process's GPU; (0, 0) without one."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(local_rank())


def select_device() -> torch.device:
    """Bind this process to a device; call once before any tensor is created."""
    device = current_device()
    if device.type != "cpu":
        check_device_index(device.index, torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    return device


def check_device_index(index: int, visible: int) -> None:
    if index >= visible:
        raise RuntimeError(
            f"LOCAL_RANK is {index}, but this process sees {visible} device(s): start as many"
            " processes as the node has devices, and make all of them visible to each process"
            " (Slurm: --gpus-per-node, not --gpus-per-task)"
        )


def collective_backend(device: torch.device) -> str:
    """Return the backends of the process group: gloo for host tensors.

    An accelerator has a backend of its own.
    """
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


CONTAINER = Path("/sys/fs/cgroup")
"""Folder with the limits of a container's memory (cgroup v2)."""


def ahead(
    buckets: Iterator[list[tuple[str, Tensor]]], device: torch.device, limit: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the same buckets, and compute the next one while the caller uses this one.

    This needs an accelerator, which has a separate stream for it. While the caller uses a bucket of
    more than `limit` bytes on this rank, nothing is computed.
    """
    side = _side_stream(device)
    main = torch.accelerator.current_stream(device)

    def compute_next() -> tuple[list[tuple[str, Tensor]] | None, torch.Event]:
        side.wait_stream(main)  # wait for the inputs, and for the use of previous tensors
        with side:
            return next(buckets, None), side.record_event()

    bucket, event = compute_next()
    while bucket is not None:
        main.wait_event(event)
        # A DTensor cannot record a stream, and its size is that of all ranks together.
        tensors = [local_tensor(tensor) for _, tensor in bucket]
        for tensor in tensors:
            tensor.record_stream(main)
        size = sum(tensor.nbytes for tensor in tensors)
        del tensor, tensors

        if size > limit:
            yield bucket
            # The allocator reuses the memory only when the main stream has read it.
            main.synchronize()
            bucket, event = compute_next()
        else:
            following = compute_next()
            yield bucket
            bucket, event = following


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    """Return the second stream; torch keeps freed memory for the stream that it was made on."""
    return torch.Stream(device)


def begin_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    """Copy between a device and pinned memory, beside what the device is given from now on.

    Returns a function that lets the device wait for the copy; the host does not. The caller keeps
    both tensors until it has called it, so their memory is free at once afterwards. What records a
    stream instead is free when the host sees that the copy has ended, and a host runs ahead.
    """
    on_device = target if source.device.type == "cpu" else source
    if on_device.device.type == "cpu":
        target.copy_(source)
        return lambda: None

    side, main = _side_stream(on_device.device), torch.accelerator.current_stream(on_device.device)
    side.wait_stream(main)
    with side:
        target.copy_(source, non_blocking=True)
    return partial(main.wait_event, side.record_event())


def has_flash_attention(device: torch.device) -> bool:
    """Return True if the device can run flash attention kernels: NVIDIA Ampere and later."""
    return device.type == "cuda" and torch.version.cuda is not None and has_bf16()


def is_hopper() -> bool:
    """Return True if this process has an H100, an H200, or another GPU of that generation."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(local_rank())[0] == 9


LOG2_E = math.log2(math.e)
"""e^x is 2 to the power of x times this."""
VECTORS = 32
"""Numbers that torch's loops compute together on a CPU: two of the largest vectors."""
WIDENED_ROWS = 8192
"""Number of rows of a matrix that a CPU casts to float32 at a time."""


def float32_product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write left [M, K] times the transpose of right [N, K] to `out` [M, N], and return it.

    The sums are float32 and are not rounded to the dtype of the factors. An accelerator has such a
    product of bfloat16 matrices. A CPU casts the factors, `right` some rows at a time.
    """
    if left.dtype == torch.float32:
        return torch.mm(left, right.T, out=out)
    if left.device.type != "cpu":
        return torch.mm(left, right.T, out_dtype=torch.float32, out=out)
    wide = left.float()
    for rows, columns in zip(right.split(WIDENED_ROWS), out.split(WIDENED_ROWS, 1), strict=True):
        torch.mm(wide, rows.float().T, out=columns)
    return out


@cache
def is_amd() -> bool:
    """Return True if the host's processor is AMD's, by whose name a run always chooses the same."""
    description = Path("/proc/cpuinfo")
    return description.exists() and "AuthenticAMD" in description.read_text()


def exponentials(exponents: Tensor, out: Tensor) -> Tensor:
    """Write the exponentials of `exponents` [t, v] float32 to `out`, and return it.

    On processors of AMD torch's exp2 takes a third of the time of its exp, and on those of Intel 1.2
    times as long. But it computes the last numbers of a thread, if they do not fill its vectors,
    with another function that rounds differently, and then equal rows would differ. So it is used
    where no number is left over.
    """
    by_vectors = exponents.shape[-1] % VECTORS == 0 and torch.get_num_threads() == 1
    if exponents.device.type == "cpu" and by_vectors and is_amd():
        return torch.mul(exponents, LOG2_E, out=out).exp2_()
    return torch.exp(exponents, out=out)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes since the start: of the accelerator, or on the CPU of the process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    import resource  # POSIX only, like the launchers of torch.distributed

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now: allocated on the accelerator, resident on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _process(os.getpid()).memory_info().rss


# Finding a process anew, each time, reads twice as many files.
_process = cache(psutil.Process)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of an accelerator, over all processes."""
    return torch.accelerator.get_memory_info(device)


def free_host_memory() -> int:
    """Return the bytes of host memory that processes can still take.

    The limit of the container counts.
    """
    free = psutil.virtual_memory().available
    try:
        limit, used = (
            int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current")
        )
        # The kernel gives up cached files when memory is short.
        cached = next(
            int(line.split()[1])
            for line in (CONTAINER / "memory.stat").open()
            if line.startswith("inactive_file ")
        )
    except (OSError, ValueError, StopIteration):  # not in a container, or without a limit
        return free

    return min(free, limit - used + cached)


def idle_pinned_memory(device: torch.device) -> int:
    """Return the bytes of pinned host memory that torch keeps for the next pinned tensors."""
    if device.type != "cuda":
        return 0
    counts = torch.cuda.host_memory_stats()
    return counts["allocated_bytes.current"] - counts["active_bytes.current"]


def occupied_memory(device: torch.device) -> int:
    """Return the occupied bytes of the accelerator, or the resident ones on the CPU.

    On an accelerator this includes engines with their own allocators.
    """
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        return total - free
    return _process(os.getpid()).memory_info().rss


def release_cached_memory(device: torch.device) -> None:
    """Release cached blocks, so that the engine and the trainer can share one device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def grow_segments(device: torch.device, *, allowed: bool = True) -> None:
    """Let torch's segments of GPU memory grow, so that tensors of new sizes find room in them.

    A choice in the user's PYTORCH_ALLOC_CONF counts. No address in such a segment can be sent to
    another process as a CUDA handle: SGLang gets weights so, and vLLM's all-reduce exchanges
    addresses when it captures CUDA graphs (the process would end). So this is never called beside
    SGLang, and while a vLLM engine starts growth is not `allowed`, whatever the user has chosen.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = [setting for setting in chosen.split(",") if setting]
    if not allowed or "expandable_segments" not in chosen:
        settings = [setting for setting in settings if "expandable_segments" not in setting]
        settings.append(f"expandable_segments:{allowed}")
    # These settings replace all others.
    torch.cuda.memory._set_allocator_settings(",".join(settings))


@contextmanager
def host_cores() -> Iterator[None]:
    """Use this rank's share of the host's cores, for AdamW in host memory.

    Launchers set one thread per rank. They may also bind a rank to cores that only some of the
    others use, so the cores of the launcher are divided.
    """
    before = torch.get_num_threads()
    of_launcher = len(os.sched_getaffinity(os.getppid()))
    share = of_launcher // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(before, min(share, len(os.sched_getaffinity(0)))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def machine() -> dict[str, str]:
    """Describe what computes: another machine may round the same sums differently."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the caller's generators afterwards: torch on host and device, numpy, random."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch_state_kept(device)():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def torch_state_kept(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes contexts, after which torch's generators are as before.

    These are the generators of the host, and of an accelerator.
    """
    devices = [] if device.type == "cpu" else [device]
    return partial(torch.random.fork_rng, devices, device_type=device.type if devices else "cuda")
