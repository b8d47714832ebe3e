"""Why: other kernels must compute the same model.

Where they cannot, a run must say so before it trains another one.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flat_models import make_model
from hosts import where_triton_interprets
from lightrft.config import Config
from lightrft.config.resolve import strategy_problems
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.logits.liger_kernel import LIGER_FAMILIES, fuse
from models.interpreted_liger import check


@pytest.mark.slow
def test_log_probs_and_gradients_are_those_of_transformers():
    """Parameters are also sharded over two ranks, with activations computed again."""
    pytest.importorskip("liger_kernel")
    rows = where_triton_interprets(check)
    assert {name for name, _ in rows} == {*LIGER_FAMILIES, "sharded, full", "sharded, selective"}
    assert all(0 < deviation <= 1e-5 for _, deviation in rows), rows


def test_models_that_it_cannot_compute_are_named():
    with pytest.raises(
        ValueError,
        match="'cohere' is not one of exaone4, gemma, .*; the kernels need an accelerator",
    ):
        fuse(make_model("cohere", ATTENTION), torch.device("cpu"))

    config = AutoConfig.for_model(
        "qwen2",
        hidden_act="gelu",
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
        vocab_size=9,
    )
    with pytest.raises(
        ValueError, match="--fused_kernels liger .* its activation is gelu, not silu"
    ):
        fuse(torch.nn.ModuleList([AutoModelForCausalLM.from_config(config)]), torch.device("cuda"))


def test_incompatible_settings_are_named():
    selective = {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}
    assert strategy_problems(Config.of(fused_kernels="liger", **selective)) == []
    (problem,) = strategy_problems(Config.of(fused_kernels="liger", **selective, tp_size=2))
    assert "--tp_size 1" in problem
