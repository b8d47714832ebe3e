"""Let vLLM's kernel for products of int8 on CPUs take new weights; importing this registers it."""

from functools import cache

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum
from vllm.utils.torch_utils import set_default_torch_dtype


@cache
def onednn_is_exact() -> bool:
    """Return whether oneDNN's products of int8 are right on this processor.

    Without VNNI instructions oneDNN adds pairs of products in 16 bits, where large ones overflow.
    """
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    one = torch.ones(64, 1, dtype=torch.float32)
    product = torch.empty(64, 64, dtype=torch.float32)
    handler = ops.create_onednn_scaled_mm(largest.t(), one, torch.float32, True, False, 32)
    ops.onednn_scaled_mm(handler, largest, product, one, None, None, None)
    return bool((product == 64 * 127 * 127).all())


class ReloadableInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """Kernel for every dtype and processor, whose handle may outlive the tensors of a reload.

    vLLM's handle of oneDNN has the address of the scales alone. A reload copies them back into the
    tensor of before, and would free the memory that the handle reads. The results have torch's
    default dtype, and that is the model's only while vLLM starts. The weight that was packed leaves
    an empty one, because slots for adapters ask it for the device.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not onednn_is_exact():
            self.linear_method = self._multiply_as_floats
        elif layer.params_dtype == torch.float32:
            # With AMX vLLM would choose a kernel by shape that rejects inputs of float32.
            self.linear_method = self._apply_weights_onednn
            self.process_weights_for_onednn(layer)
        else:
            super().process_weights_after_loading(layer)

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        with set_default_torch_dtype(layer.params_dtype):
            super().process_weights_for_onednn(layer)
        self.dnnl_handler.scales = layer.weight_scale
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)

    def _multiply_as_floats(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply codes [N, K] int8 with inputs [..., K], rounded to int8 as oneDNN does it."""
        codes, scales, *_ = self._get_layer_params(layer)
        rounded, input_scales, _ = ops.onednn_scaled_int8_quant(
            x.reshape(-1, x.shape[-1]), None, None, True
        )
        product = rounded.float() @ codes.float().T * input_scales * scales.flatten()
        if bias is not None:
            product += bias
        return product.to(x.dtype).view(*x.shape[:-1], -1)


linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = [ReloadableInt8Kernel]
