"""Why: tensor parallelism must be a matter of memory and speed alone. Three GRPO updates on every (data, tensor) layout of up to
four ranks come out as those of the loop in plain torch, and the copies of every parameter stay equal to the last bit.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from invariants.test_layouts import Layout, plain_torch, trained
from parallel.families import family_model
from ranks import run_ranks

LAYOUTS = [
    Layout(2, tp=2, tokens=30),
    Layout(2, tp=1, sequences=2),
    Layout(4, tp=2, chunk=7 * 131),
    Layout(4, tp=4, checkpointing=True),
    Layout(4, tp=2, replicas=2, tokens=24),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tie"), [("qwen3", False), ("gemma3", True)])
def test_every_tensor_parallel_layout_is_plain_torch(tmp_path, family, tie):
    folder = family_model(tmp_path, family, tie=tie, vocabulary=261, heads=4, kv_heads=4)
    mode = "seq-mean-token-mean"
    expected_numbers, expected = plain_torch(folder, mode)
    start = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    for layout in LAYOUTS:
        results = run_ranks(layout.ranks, trained, folder, mode, layout)
        for numbers, parameters in results:
            torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected_numbers), rtol=1e-5, atol=1e-6)
            assert parameters.keys() == expected.keys()
            for name, tensor in parameters.items():
                assert (tensor - expected[name]).norm() <= 1e-5 * expected[name].norm(), (layout, name)
                assert (tensor - expected[name]).norm() <= 2e-3 * (expected[name] - start[name]).norm(), (layout, name)
                assert torch.equal(tensor, results[0][1][name]), (layout, name)
