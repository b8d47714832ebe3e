"""Cases of test_liger_kernel.py that run in another process."""

from importlib import import_module

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from triton.runtime import interpreter

from flat_models import MIXTURES, MODELS, gradients_of, make_batch, make_model, weighted
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.logits.liger_kernel import LIGER_FAMILIES, fuse
from lightrft.models.parallel.recompute import recompute
from ranks import run_ranks, whole

CPU = torch.device("cpu")
SHAPES = {family: {"num_hidden_layers": 1} for family in LIGER_FAMILIES} | {
    "gemma": {"head_dim": 8, "num_hidden_layers": 1},
    "gemma3_text": MODELS["gemma3"][1],
    "granite": MODELS["granite"][1] | {"num_hidden_layers": 1},
    "hunyuan_v1_dense": {"head_dim": 8, "num_hidden_layers": 1},
    "mistral": MODELS["mistral window"][1],
    "qwen3": MODELS["qwen3"][1],
    "qwen3_moe": MIXTURES["experts"][1] | {"num_hidden_layers": 1},
}
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
    """Add what the interpreter lacks: floats, and functions of CUDA's library."""
    interpreter._implicit_cvt = with_floats
    import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: 1.0 / tl.sqrt(x)
    import_module("liger_kernel.ops.geglu").tanh = lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0


def results(actor: Actor) -> tuple[Tensor, dict[str, Tensor]]:
    values = actor(make_batch([3, 2, 4]), 0.8)
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


def sharded(policy: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Compare two ranks with one.

    Both have the same batch, so the mean of their gradients is one rank's; activations are computed
    again.
    """
    model = make_model("qwen3", ATTENTION)
    fuse(model, CPU)
    recompute(model, policy)
    actor = Actor(model).train()
    for block in model.get_decoder().layers:
        fully_shard(block)
    fully_shard(actor)
    return results(actor)


def check() -> list[tuple[str, float]]:
    """Return the deviation of each family, and of one whose parameters two ranks share."""
    prepare()
    found = []
    for family, options in SHAPES.items():
        MODELS[family] = (family, options)
        # The package changes the classes of a family, so the reference comes first.
        expected = results(Actor(make_model(family, ATTENTION)).train())
        model = make_model(family, ATTENTION)
        fuse(model, CPU)

        block = model.get_decoder().layers[0]
        patched = block.self_attn.q_norm if family == "qwen3_moe" else block.mlp
        assert "Liger" in patched.forward.__func__.__qualname__, family
        found.append((family, deviation(results(Actor(model).train()), expected)))
        if family == "qwen3":
            for policy in ("full", "selective"):
                for rank in run_ranks(2, sharded, policy):
                    found.append((f"sharded, {policy}", deviation(rank, expected)))
    return found
