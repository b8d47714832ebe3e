"""Why: who has a program with TRL's trainers changes its import, and not the objects it made."""

import pytest

from lightrft.config.errors import ConfigError
from lightrft.config.sections import Config
from lightrft.extras.compat.trl_objects import taken

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

ROWS = [{"prompt": "2+2=", "answer": "4"}]


PLAIN = {"use_cpu": True, "bf16": False, "output_dir": "out"}


def short(completions, **columns):
    return [float(-len(each)) for each in completions]


def test_objects_of_trl_are_taken_as_they_are():
    args = trl.GRPOConfig(
        use_cpu=True,
        bf16=False,
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        beta=0.1,
        scale_rewards=False,
        mask_truncated_completions=True,
    )
    values, notices = taken(
        "train_ppo",
        {
            "model": "some/model",
            "reward_funcs": short,
            "args": args,
            "train_dataset": ROWS,
            "peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
            "processing_class": "a tokenizer",
            "seed": 7,
        },
    )
    assert values["reward"] is short and values["prompt_data"] is ROWS
    assert values["tokenizer"] == "a tokenizer"
    assert len(notices) == 1 and "train_batch_size 32" in notices[0]

    config = Config()
    objects = ("model", "tokenizer", "prompt_data", "reward")
    config.update({name: value for name, value in values.items() if name not in objects})
    expected = {
        "train_batch_size": 32,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 8,
        "init_kl_coef": 0.1,
        "use_kl_loss": True,
        "advantage_estimator": "dr_grpo",
        "mask_truncated": True,
        "lora_rank": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "learning_rate": 1e-6,
        "num_episodes": 3,
        "generate_max_len": 512,
        "save_path": "out",
        "seed": 7,
        "bf16": False,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_names_alone_keep_the_defaults_of_this_program():
    values, _ = taken("train_sft", {"output_dir": "out", "per_device_train_batch_size": 4})
    assert values == {"save_path": "out", "train_batch_size": 4}


def test_names_of_this_program_pass():
    values = {"prompt_data": ROWS, "lr_scheduler": "cosine", "no_such_name": 1}
    assert taken("train_sft", values) == (values, [])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"args": {"output_dir": "x"}},
            "args of train_ppo is an object of GRPOConfig, not of dict",
        ),
        ({"args": trl.SFTConfig(**PLAIN)}, "is an object of GRPOConfig, not of SFTConfig"),
        ({"args": trl.RLOOConfig(**PLAIN)}, "is an object of GRPOConfig, not of RLOOConfig"),
        ({"peft_config": peft.IA3Config()}, "peft_config is an object of LoraConfig, not of IA3C"),
        ({"args": trl.GRPOConfig(**PLAIN, reward_weights=[1.0, 0.5])}, "write --reward NAME:WEIG"),
        ({"peft_config": peft.LoraConfig(modules_to_save=["lm_head"])}, "have no modules_to_save"),
        ({"callbacks": [print]}, "there are no callbacks"),
        ({"optimizers": (None, None)}, "write --optimizer"),
        ({"peft_config": peft.LoraConfig(use_dora=True)}, "adapters here have no use_dora"),
        ({"loss_type": "of_mine"}, "loss_type: write"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(values, said):
    with pytest.raises(ConfigError, match=said):
        taken("train_ppo", values)


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig", "DPOConfig", "KTOConfig"])
def test_an_untouched_configuration_is_accepted(name):
    command = {"GRPOConfig": "train_ppo"}.get(name, f"train_{name[:3].lower()}")
    config = getattr(trl, name)(use_cpu=True, bf16=False, output_dir="out")
    values, _ = taken(command, {"args": config})
    Config().update(values)
