"""Why: libraries choose kernels by the processor, and users have others than this one.

Parts of the suite run once more where neither AVX512 nor AMX is seen. With AMX, choices that vLLM
makes in Python are imitated in engine/test_quantized.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
MASKS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SEEN = """
import torch
print(torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
"""
PARTS = [
    "engine/test_quantized.py::test_vllm_computes_with_int8_after_every_load[1-False]",
    "engine/test_vllm.py::test_every_weight_is_proven",
    "models/parallel/test_device.py",
    "invariants/test_expert_parallel.py::test_every_family_learns_as_plain_torch",
    "extras/tinker/test_tinker.py::test_gradients_are_those_of_plain_torch_in_every_layout",
    "extras/exact/test_exact.py::test_logprobs_do_not_depend_on_other_rows",
    "extras/exact/test_exact.py::test_engine_and_trainer_agree_in_every_bit",
]
"""Tests of engine, sampling, layouts and bitwise equality."""


def masked() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS / "masked_processor"), *filter(None, sys.path)])
    return os.environ | MASKS | {"PYTHONPATH": path}


def test_the_masks_hide_what_this_processor_has():
    done = subprocess.run(
        [sys.executable, "-c", SEEN], env=masked(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["AVX2", "False", "False"], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="this processor has neither AVX512 nor AMX, so the whole suite runs without them",
)
def test_parts_pass_without_avx512_and_amx():
    names = [str(TESTS / part) for part in PARTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *names],
        env=masked(),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
