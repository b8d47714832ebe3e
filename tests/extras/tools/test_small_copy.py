"""A small copy computes like the model: only sizes shrink."""

import pytest
from transformers import AutoConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniConfig

from lightrft.app.trainer.selfcheck import compare_small_copy
from lightrft.app.trainer.small_copy import small_config, small_model
from lightrft.models.qwen_omni import trained_config

MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
MEDIA = {
    "gemma3": {},
    "idefics3": {},
    "internvl": {},
    "llava": {},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_audio": {},
    "qwen3_vl": {},
    "smolvlm": {},
}


@pytest.mark.parametrize("family", MEDIA)
def test_the_language_part_of_a_model_that_sees_or_hears(family):
    config = AutoConfig.for_model(family, **MEDIA[family])
    small = small_config(config)
    model = small_model(small, "eager")
    assert type(small) is type(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert not any(each.differs for each in compare_small_copy(config))


def test_the_thinker():
    thinker = {"text_config": {"rope_parameters": MROPE}}
    config = trained_config(Qwen2_5OmniConfig(thinker_config=thinker))
    assert not any(each.differs for each in compare_small_copy(config))


def test_there_is_a_layer_of_each_type():
    gemma = small_config(AutoConfig.for_model("gemma3_text", num_hidden_layers=62))
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert (gemma.num_hidden_layers, gemma.sliding_window) == (2, 4)
    deepseek = small_config(AutoConfig.for_model("deepseek_v3", num_hidden_layers=61))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)
    smollm = small_config(AutoConfig.for_model("smollm3", num_hidden_layers=36))
    assert sorted(smollm.no_rope_layers) == [0, 1]
    shared = small_config(AutoConfig.for_model("gemma3n_text"))
    assert shared.layer_types == ["sliding_attention", "full_attention"] * 2
    assert shared.num_kv_shared_layers == 2


def test_behaviour_stays():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + n for n in range(48)],
        "long_factor": [2.0 + n for n in range(48)],
        "original_max_position_embeddings": 4096,
    }
    config = AutoConfig.for_model(
        "phi3", rope_parameters=rope, max_position_embeddings=131072, sliding_window=2047
    )
    small = small_config(config)
    assert small.rope_parameters["rope_type"] == "longrope"
    assert small.rope_parameters["short_factor"] == [1.0, 2.0, 3.0, 4.0]
    assert small.max_position_embeddings == 131072
    granite = small_config(AutoConfig.for_model("granite", logits_scaling=8.0))
    assert granite.logits_scaling == 8.0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ratio"), [(32, 32, 1), (32, 8, 4), (28, 4, 4), (24, 8, 3), (12, 1, 4)]
)
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_heads_keep_their_ratio_and_can_be_split(heads, kv_heads, ratio, ranks):
    config = AutoConfig.for_model("qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads)
    small = small_config(config, multiple=ranks)
    assert small.num_attention_heads == ratio * small.num_key_value_heads
    assert small.num_attention_heads % ranks == 0
    assert small.num_key_value_heads % (1 if kv_heads == 1 else ranks) == 0
