"""The one place that decides where tensors live and which libraries carry them."""

import os

import psutil
import torch


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def current_device() -> torch.device:
    """This process's accelerator, else the CPU."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator().type, local_rank())
    return torch.device("cpu")


def select_device() -> torch.device:
    """Bind this process to its device; call once before any tensor is made."""
    device = current_device()
    if device.type != "cpu":
        check_device_index(device.index, torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    return device


def check_device_index(index: int, seen: int) -> None:
    if index >= seen:
        raise RuntimeError(
            f"LOCAL_RANK is {index}, but this process sees {seen} device(s): start as many processes as the node has, and let "
            "each see all of them (Slurm: --gpus-per-node, not --gpus-per-task)"
        )


def collective_backend(device: torch.device) -> str:
    """Backends of the process group: gloo for host tensors, the accelerator's own beside it."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"


def has_flash_attention(device: torch.device) -> bool:
    """Whether flash attention's kernels run there: NVIDIA's Ampere and later."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the accelerator since start, or of the process (resident set) on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return _resident_peak()


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now: allocated on the accelerator, resident on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return psutil.Process().memory_info().rss


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and all bytes of an accelerator, whoever uses it."""
    return torch.accelerator.get_memory_info(device)


def release_cached_memory(device: torch.device) -> None:
    """Give cached blocks back, so that the engine and the trainer can share one device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _resident_peak() -> int:
    import resource  # POSIX only, as the rest of torch.distributed's launchers

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
