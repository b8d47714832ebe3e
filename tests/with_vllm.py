"""vLLM imported once, by the process that forks ranks: each rank would import it anew, for seven seconds."""

from functools import cache
from importlib import import_module

MODELS = "qwen2", "qwen3", "qwen3_moe", "mixtral"


@cache
def load_vllm() -> None:
    """Import the adapter, and what vLLM imports when an engine starts."""
    import_module("lightrft.engine.vllm")
    import_module("compressed_tensors")
    for name in MODELS:
        import_module(f"vllm.model_executor.models.{name}")
