"""Why: no test machine has a GPU, and on one these kernels compute all log-probs.

Triton interprets them on the CPU; the reference is float64. And they are compiled for a GPU, which
needs none.
"""

import sys

import pytest
import torch

from hosts import where_triton_interprets
from lightrft.models.logits import logprobs
from models.interpreted import check, compiled, merged
from ranks import run_ranks

pytest.importorskip("triton")


def test_the_kernels_are_not_imported_where_torch_computes():
    logprobs.logprobs_of_logits(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    assert "lightrft.models.logits.triton" not in sys.modules


@pytest.mark.slow
def test_interpreted_kernels_equal_float64():
    """The vocabulary fits into a block, into some blocks, or is not a multiple.

    Masks, several targets and huge logits are covered, in both passes.
    """
    assert where_triton_interprets(check) == 18


@pytest.mark.slow
def test_interpreted_merging_equals_torch():
    where_triton_interprets(merged)


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu():
    (code,) = run_ranks(1, compiled)
    assert "ld.global" in code
