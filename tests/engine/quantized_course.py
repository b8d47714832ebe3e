"""Eight bits in an engine: loads one after another, what is generated, and what is noticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.adapter_course import adapted, adapters_of, generated, logprob_gap, stream, trained
from lightrft.engine.base import Engine, EngineError
from lightrft.engine.testing import start_engine
from lightrft.models.lora import keep_adapters_apart
from lightrft.models.parallel.device import select_device
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.weight_sync.quantized import FORMATS

INT8 = {"rollout_quantization": "int8"}


def rounded(model: PreTrainedModel, names: Any) -> PreTrainedModel:
    """A copy that has the matrices of the engine, multiplied out again."""
    copy = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            if name in names:
                codes, scales = FORMATS["int8"].quantize(parameter)
                parameter.copy_(codes.float() * scales)
    return copy


def weights(model: PreTrainedModel, engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return engine.quantization.of_stream(named)


def moved(model: PreTrainedModel, seed: int) -> None:
    """Change all matrices, as a large step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)


def is_noticed(engine: Engine, model: PreTrainedModel, ending: str, change: Any) -> bool:
    """Whether the engine says that it lacks a weight that was sent otherwise."""
    sent = engine._fingerprints(engine.verify_dtype, None)
    changed = ""
    for name, tensor in weights(model, engine):
        if name.endswith(ending) and not changed:
            changed = name
            tensor = tensor.clone()
            change(tensor)
        sent.add_sent(name, tensor)
    try:
        engine._verify(sent, empty_cache=False)
    except EngineError as error:
        return f": {changed} in the engine differs" in str(error) and "(1 of " in str(error)
    return False


def with_kernel(form: str, course: Callable[..., Any], *arguments: Any) -> Any:
    """Run a course where vLLM has one kernel, which keeps weights in another form than on CPUs.

    `turned` is that of CUTLASS, filled up: to a multiple of 48 here, of 16 there. `packed` has
    other codes in the same tensor, and `repacked` has the codes and scales of Marlin's kernel: words
    of four codes, and a row of scales in the model's dtype.
    """
    from torch.nn.functional import pad
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        Int8ScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.quantization.utils import replace_parameter

    from lightrft.engine.vllm.int8_on_cpu import ReloadableInt8Kernel

    class Kernel(Int8ScaledMMLinearKernel):
        is_supported = classmethod(lambda *_: (True, None))
        can_implement = classmethod(lambda *_: (True, None))

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            codes, scales = layer.weight.data, layer.weight_scale.data
            if form == "turned":
                more = -len(codes) % 48
                codes = pad(codes, (0, -codes.shape[1] % 48, 0, more)).t()
                scales = pad(scales, (0, 0, 0, more), value=1.0)
            elif form == "packed":
                codes = codes.flip(0, 1).contiguous()
            else:
                codes, scales = codes.contiguous().view(torch.int32), scales.t().bfloat16()
            for name, tensor in (("weight", codes), ("weight_scale", scales)):
                replace_parameter(layer, name, torch.nn.Parameter(tensor, requires_grad=False))

        def _get_layer_params(self, layer: torch.nn.Module) -> tuple:
            codes, scales, *others = super()._get_layer_params(layer)
            rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
            if form == "turned":
                codes, scales = codes.t()[:rows, :columns], scales[:rows]
            elif form == "packed":
                codes = codes.flip(0, 1)
            else:
                codes, scales = codes.view(torch.int8), scales.t().float()
            return codes, scales, *others

        def apply_weights(self, *arguments: Any) -> torch.Tensor:
            return ReloadableInt8Kernel._multiply_as_floats(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        kernels = {platform: [Kernel] for platform in linear._POSSIBLE_INT8_KERNELS}
        patch.setattr(linear, "_POSSIBLE_INT8_KERNELS", kernels)
        return course(*arguments)


def as_on_amx(course: Callable[..., Any], *arguments: Any) -> Any:
    """Run a course where torch says that the processor has AMX, by which vLLM chooses kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        return course(*arguments)


def an_engine_of_int8(folder: str, bf16: bool) -> dict[str, Any]:
    """Return name of a check -> whether it holds; gaps are numbers."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    axis = Mesh(select_device().type, tp=1).engine(dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = start_engine("vllm", folder, axis, INT8, from_stream=True, dtype=dtype)
    matrices = engine.quantization.matrices
    checks: dict[str, Any] = {
        "all_matrices": len(matrices) == 7 * model.config.num_hidden_layers,
        "unknown": len(engine._shim.weights.unknown),
        "whole_size": sum(p.nbytes // p.itemsize * dtype.itemsize for p in model.parameters()),
    }

    gaps = []
    for version in range(1, 4):
        brought = list(weights(model, engine))
        engine.load_weights(iter(brought), version)
        gaps.append(logprob_gap(rounded(model, matrices), engine, "mean"))
        if version < 3:
            moved(model, version)
    checks["gaps"] = gaps
    checks["size"] = sum(tensor.nbytes for _, tensor in brought)
    responses = [each.token_ids for each in sum(generated(engine), [])]

    engine.sleep(2)
    engine.wake("weights")
    engine.load_weights(weights(model, engine), 4)
    engine.wake("kv_cache")
    checks["same_after_sleep"] = responses == [
        each.token_ids for each in sum(generated(engine), [])
    ]

    checks["scale"] = is_noticed(
        engine, model, "1.mlp.up_proj.weight_scale", lambda scales: scales[7].mul_(1 + 2**-22)
    )
    checks["code"] = is_noticed(
        engine, model, "1.self_attn.k_proj.weight", lambda codes: codes[3, :16].zero_()
    )
    checks["norm"] = is_noticed(
        engine, model, "1.input_layernorm.weight", lambda norm: norm[5].mul_(1.01)
    )
    engine.close()
    return checks


def adapters_beside_int8(folder: str) -> dict[str, Any]:
    """Return the gap of log-probs of adapters beside int8, and the sizes of two syncs."""
    axis = Mesh(select_device().type, tp=1).engine(dist.get_world_size())
    model = adapted(folder)
    keep_adapters_apart(model)
    engine = start_engine(
        "vllm",
        folder,
        axis,
        INT8,
        from_stream=True,
        dtype=torch.float32,
        adapters=adapters_of(model),
    )
    found: dict[str, Any] = {"held": engine.adapters is not None, "gaps": [], "sizes": []}
    for version in range(1, 4):
        trained(model, version)
        base = not engine.has_base
        brought = engine.quantization.of_stream(stream(model, torch.float32, base=base))
        kept = list(brought)
        engine.load_weights(iter(kept), version)
        found["sizes"].append(sum(tensor.nbytes for _, tensor in kept))
        found["gaps"].append(logprob_gap(model, engine, "mean"))
    engine.close()
    return found


def with_a_cache_of_fp8(folder: str) -> float:
    """Return the mean gap of log-probs if keys and values have eight bits too."""
    axis = Mesh(select_device().type, tp=1).engine(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    flags = INT8 | {"engine_args": '{"kv_cache_dtype": "fp8"}'}
    engine = start_engine("vllm", folder, axis, flags, from_stream=True, dtype=torch.bfloat16)
    for version in (1, 2):
        engine.load_weights(weights(model, engine), version)
    gap = logprob_gap(model, engine, "mean")
    engine.close()
    return gap


def stale_scales(folder: str) -> str:
    """Return the error if a stream brings codes without their scales."""
    axis = Mesh(select_device().type, tp=1).engine(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = start_engine("vllm", folder, axis, INT8, from_stream=True)
    engine.load_weights(weights(model, engine), 1)
    codes = [named for named in weights(model, engine) if not named[0].endswith("_scale")]
    try:
        engine.load_weights(iter(codes), 2)
    except (EngineError, ValueError) as error:
        return str(error)
    finally:
        engine.close()
    return ""
