"""Why: no test machine has a GPU, and on one these kernels compute all log-probs.

Triton interprets them on the CPU, in a process of its own because it decides when it is imported;
the reference is float64. And they are compiled for a GPU, which needs none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightrft.models.logits import logprobs

pytest.importorskip("triton")


def python(program: str, **environment: str) -> str:
    paths = os.pathsep.join(
        [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | environment | {"PYTHONPATH": paths},
    )
    assert not run.returncode, run.stderr[-3000:]

    return run.stdout


def test_the_kernels_are_not_imported_where_torch_computes():
    logprobs.logprobs_of_logits(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    assert "lightrft.models.logits.triton" not in sys.modules


@pytest.mark.slow
def test_interpreted_kernels_equal_float64():
    """The vocabulary fits into a block, into some blocks, or is not a multiple.

    Masks, several targets and huge logits are covered, in both passes.
    """
    assert (
        python("from models.interpreted import check; check()", TRITON_INTERPRET="1").strip()
        == "18 cases"
    )


@pytest.mark.slow
def test_interpreted_merging_equals_torch():
    assert (
        python("from models.interpreted import merged; merged()", TRITON_INTERPRET="1").strip()
        == "merged"
    )


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu():
    assert "ld.global" in python("from models.interpreted import compiled; print(compiled())")
