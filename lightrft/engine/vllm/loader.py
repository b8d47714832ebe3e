"""Replace a model loader of vLLM; importing this module registers it."""

import torch
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


@register_model_loader("dummy")
class _NoWeights(DummyModelLoader):
    """Dummy loader for engines that await a stream: random weights, but original buffers.

    Buffers are not streamed. Models that draft start with the weights of the folder, because most
    models never get others.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        if model_config.runner_type == "draft":
            DefaultModelLoader(LoadConfig()).load_weights(model, model_config)
            return
        # Scales of an attention layer's cache say that no file has brought them.
        scales = [
            parameter for name, parameter in model.named_parameters() if name.endswith(CACHE_SCALES)
        ]
        # A view of a weight, as Mamba 2 has of its convolution, is no buffer of its own.
        of_weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
        buffers = [
            tensor
            for tensor in model.buffers()
            if tensor.untyped_storage().data_ptr() not in of_weights
        ]

        saved = [(tensor, tensor.detach().clone()) for tensor in (*buffers, *scales)]
        super().load_weights(model, model_config)
        with torch.no_grad():
            for tensor, values in saved:
                tensor.copy_(values)
