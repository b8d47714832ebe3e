"""What vLLM loads and computes otherwise than by itself: it takes these for its own, once this is imported."""

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


@register_model_loader("dummy")
class _NoWeights(DummyModelLoader):
    """Before the first stream: random weights, as vLLM has them, but buffers as the model makes them, which no stream brings."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
        super().load_weights(model, model_config)
        for buffer, values in saved:
            buffer.copy_(values)


@RMSNorm.register_oot(name="RMSNorm")
class _HostRMSNorm(RMSNorm):
    """vLLM's kernel for CPUs, which it has and does not choose: five to ten times as fast as torch, operation by operation.

    Its vectors have up to 16 numbers. In bfloat16 it would round otherwise than transformers does.
    """

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight, plain = self.weight.data, self.has_weight and self.variance_size_override is None
        if not plain or not x.dtype == weight.dtype == torch.float32 or x.shape[-1] % 16:
            return self.forward_native(x, residual)
        if residual is None:
            normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            torch.ops._C.rms_norm.default(normed, x.contiguous(), weight, self.variance_epsilon)
            return normed
        if not x.is_contiguous() or not residual.is_contiguous():
            return self.forward_native(x, residual)
        torch.ops._C.fused_add_rms_norm.default(x, residual, weight, self.variance_epsilon)
        return x, residual
