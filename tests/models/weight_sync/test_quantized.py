"""Eight bits in the stream: names, bytes and codes, beside an independent quantiser."""

from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lightrft.engine.model_info import published_names
from lightrft.models.qwen_omni import load_config
from lightrft.models.weight_sync.fused_layout import FusedWeights
from lightrft.models.weight_sync.quantized import FORMATS, Quantization
from tiny import tiny_model

KINDS = {"int8": "int", "fp8": "float"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model") / "model", tie=True)


def matrices() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-6, 0.02, 30.0):
        matrix = torch.randn(48, 80, generator=generator) * scale
        matrix[3] = 0
        matrix[5, 7] = -abs(matrix).max() * 2
        yield matrix
    yield torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 3.0, -2.0, 127.5]])


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_are_those_of_compressed_tensors(name: str) -> None:
    args = QuantizationArgs(num_bits=8, type=KINDS[name], symmetric=True, strategy="channel")
    for matrix in matrices():
        codes, scales = FORMATS[name].quantize(matrix)
        theirs, zero = calculate_qparams(
            matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True), args
        )
        assert torch.equal(scales, theirs)
        expected = quantize(matrix, theirs, zero, args, dtype=FORMATS[name].dtype)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


class Kernels(TorchDispatchMode):
    """While entered, counts the operations that compute something."""

    def __enter__(self) -> Self:
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += not function.is_view and not function.name().startswith("aten::empty")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_quantises_a_large_matrix_with_few_kernels(name: str) -> None:
    """A kernel of 4 MB ends before the next one is launched: a sync of 70B would have 670,000."""
    matrix = torch.empty(8192, 28672, device="meta")
    with Kernels() as kernels:
        FORMATS[name].quantize(matrix)
    assert kernels.count < 100


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_has_codes_with_scales_and_leaves_the_rest(
    folder: str, name: str, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = published_names(load_config(folder))
    shapes = dict(names.shapes)
    quantization = Quantization(name, names, dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sent = dict(quantization.of_stream(iter(weights.items())))

    assert sent.keys() == names.shapes.keys()
    assert all(sent[name].shape == shape for name, shape in names.shapes.items())
    matrices = [name for name in shapes if "_proj." in name]
    assert [name for name in shapes if sent[name].dtype != dtype] == matrices
    for matrix in matrices:
        codes = sent[matrix]
        scales = sent[matrix.removesuffix("weight") + "weight_scale"]
        assert (codes.dtype, scales.dtype) == (FORMATS[name].dtype, torch.float32)
        worst = (codes.float() * scales - weights[matrix]).abs() / weights[matrix].abs().amax(
            1, True
        )
        assert worst.max() < (1 / 254 if name == "int8" else 1 / 27)
    for other in shapes.keys() - set(matrices):
        assert torch.equal(sent[other], weights[other].to(dtype))


class ColumnParallelLinear(torch.nn.Module):
    """Layer of two matrices with the attributes of vLLM's, as kernels of CUDA leave it."""

    def __init__(self, codes: list[torch.Tensor], scales: list[torch.Tensor]):
        super().__init__()
        bits = torch.cat([each.view(torch.uint8) for each in codes])
        self.weight = torch.nn.Parameter(bits.view(codes[0].dtype).t(), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.cat(scales), requires_grad=False)
        self.input_size_per_partition = 24
        self.output_partition_sizes = [len(each) for each in codes]
        self.tp_rank = 0
        self.tp_size = 1


@pytest.mark.parametrize("name", FORMATS)
def test_layers_are_read_where_kernels_of_cuda_have_turned_them(name: str) -> None:
    """They have codes as [columns, rows]; the engine's sums are those of the stream."""
    codes, scales = zip(
        *(FORMATS[name].quantize(torch.randn(rows, 24)) for rows in (32, 16)), strict=True
    )
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.gate_up_proj = ColumnParallelLinear(list(codes), list(scales))
    sent = {}
    for layer, *tensors in zip(("gate_proj", "up_proj"), codes, scales, strict=True):
        sent |= {f"mlp.{layer}.weight": tensors[0], f"mlp.{layer}.weight_scale": tensors[1]}
    shapes = {each: tensor.shape for each, tensor in sent.items()}
    weights = FusedWeights(model, {each: each for each in shapes}, shapes)
    assert not weights.unknown

    def wrong() -> list[str]:
        prints = weights.fingerprints(torch.bfloat16, None)
        for key, tensor in sent.items():
            prints.add_sent(key, tensor)
        mine = weights.fingerprints(torch.bfloat16, None)
        weights.add_to(mine)
        return prints.wrong(mine.numbers(torch.device("cpu")))

    assert wrong() == []
    sent["mlp.up_proj.weight_scale"] = sent["mlp.up_proj.weight_scale"] * (1 + 2**-22)
    assert wrong() == ["mlp.up_proj.weight_scale"]
    other = sent["mlp.gate_proj.weight"].view(torch.uint8).clone()
    other[9, 3] ^= 1
    sent["mlp.gate_proj.weight"] = other.view(codes[0].dtype)
    assert wrong() == ["mlp.gate_proj.weight", "mlp.up_proj.weight_scale"]
