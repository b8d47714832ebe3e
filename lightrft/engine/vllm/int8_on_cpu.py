"""Let vLLM's kernel for products of int8 on CPUs take new weights; importing this registers it."""

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum
from vllm.utils.torch_utils import set_default_torch_dtype


class ReloadableInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """Kernel whose handle may outlive the tensors of a reload.

    vLLM's handle of oneDNN has the address of the scales alone. A reload copies them back into the
    tensor of before, and would free the memory that the handle reads. The results have torch's
    default dtype, and that is the model's only while vLLM starts. The weight that was packed leaves
    an empty one, because slots for adapters ask it for the device.
    """

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        with set_default_torch_dtype(layer.params_dtype):
            super().process_weights_for_onednn(layer)
        self.dnnl_handler.scales = layer.weight_scale
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)


linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = [ReloadableInt8Kernel]
