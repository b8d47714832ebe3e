"""Cases of test_liger_kernel.py that run in a process of their own."""

from importlib import import_module

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from triton.runtime import interpreter

from flat_models import gradients_of, make_batch, make_model, weighted
from lightrft.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.liger_kernel import fuse
from lightrft.models.recompute import recompute
from ranks import run_ranks, whole

CPU = torch.device("cpu")
convert = interpreter._implicit_cvt


def with_floats(argument: object) -> object:
    """Return a kernel's argument with floats as float32, as on a device.

    The interpreter would leave them Python's.
    """
    if type(argument) is float:
        return tl.tensor(
            interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32
        )
    return convert(argument)


def prepare() -> None:
    """Add what the interpreter lacks: floats, and the function of CUDA's library that the norm
    calls.
    """
    interpreter._implicit_cvt = with_floats
    import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: 1.0 / tl.sqrt(x)


def results(actor: Actor) -> tuple[Tensor, dict[str, Tensor]]:
    values = actor(make_batch([5, 7, 9]), 0.8)
    weighted(values).backward()
    return values[0].detach(), {
        name: whole(gradient) for name, gradient in gradients_of(actor.language_model).items()
    }


def deviation(found: tuple, expected: tuple) -> float:
    """Return the largest deviation of log-probs, and of gradients relative to their norm."""
    gradients = [
        (found[1][name] - wanted).norm() / wanted.norm() for name, wanted in expected[1].items()
    ]
    return max([(found[0] - expected[0]).abs().max(), *gradients]).item()


def sharded() -> tuple[Tensor, dict[str, Tensor]]:
    """Compare two ranks with one.

    Both have the same batch, so the mean of their gradients is one rank's; activations are computed
    again.
    """
    model = make_model("qwen3", ATTENTION)
    fuse(model, CPU)
    recompute(model, selective=False)
    actor = Actor(model).train()
    for block in model.get_decoder().layers:
        fully_shard(block)
    fully_shard(actor)
    return results(actor)


def check() -> None:
    prepare()
    # before the exchange
    expected = {
        name: results(Actor(make_model(name, ATTENTION)).train()) for name in ("qwen2", "qwen3")
    }
    model = make_model("qwen2", ATTENTION)
    fuse(model, CPU)
    assert "Liger" in model.get_decoder().layers[0].mlp.forward.__func__.__qualname__
    print("qwen2", deviation(results(Actor(model).train()), expected["qwen2"]))
    for rank in run_ranks(2, sharded):
        print("qwen3", deviation(rank, expected["qwen3"]))
