"""Compiles a product of float32 matrices for a GPU, as in the attention of vLLM, and prints how
Triton rounds the factors.
"""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(left, right, out):
    offsets = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + offsets, tl.dot(tl.load(left + offsets), tl.load(right + offsets)))


compiled = triton.compile(
    ASTSource(product, dict.fromkeys(("left", "right", "out"), "*fp32")),
    target=GPUTarget("cuda", 90, 32),
)
(line,) = (line for line in compiled.asm["ttir"].splitlines() if "tt.dot" in line)
rounding = re.search(r"inputPrecision = (\w+)", line)
print(rounding[1] if rounding else "none")
