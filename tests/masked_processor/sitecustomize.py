"""Let a process and its children see a processor with AVX2 alone.

The environment of test_masked.py hides newer instructions from oneDNN, MKL and ATen. vLLM asks
torch.cpu, so its answers are masked here, as soon as that module is imported.
"""

import importlib.abc
import importlib.util
import sys

NEWER = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported")
NEWER_TILES = ("_is_amx_tile_supported", "_is_amx_fp16_supported")


class MaskedLoader(importlib.abc.Loader):
    """Loads torch.cpu, and then answers that the processor has no newer instructions."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        for name in NEWER + NEWER_TILES:
            if name in vars(module):
                setattr(module, name, lambda: False)


class MaskedFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = MaskedLoader(spec.loader)
        return spec


sys.meta_path.insert(0, MaskedFinder())
