"""What must be the same when a run continues, and what may change."""

import json
from dataclasses import replace

import pytest
from transformers import Qwen2_5_VLConfig, Qwen3Config, Qwen3ForCausalLM

from lightrft.app.run.resume_check import (
    FIXED,
    FIXED_WITH_FROZEN,
    NO_EFFECT_ON_NUMBERS,
    changed_settings,
    identity,
)
from lightrft.config import Config, ConfigError, section_of_field
from lightrft.core.samples import Answer, Prompt, TokenIds
from lightrft.data.digests import digest
from lightrft.data.prompt_set import LoadedSet, PromptSet
from lightrft.models.weight_files import NOT_THE_MODEL, weights_of
from tiny import tiny_model


def rows(count: int = 200) -> list[Prompt]:
    return [
        Prompt(index=i, text=f"{i}+1=", token_ids=[i, 43, 49, 61], columns={"label": str(i + 1)})
        for i in range(count)
    ]


def of(data: list[Prompt] | None = None, model: Qwen3Config | None = None, **settings) -> dict:
    """Return an identity as it is after its way through a checkpoint."""
    config = Config()
    owners = section_of_field()
    for name, value in settings.items():
        setattr(getattr(config, owners[name]), name, value)
    prompts = PromptSet([LoadedSet("", rows() if data is None else data)])
    return json.loads(json.dumps(identity(config, model or Qwen3Config(), prompts)))


def refusal(now: dict, before: dict | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        changed_settings(before or of(), now)
    return str(error.value)


def test_data_are_known_as_to_checkpoints_of_earlier_versions():
    """Written down when prompts and answers had lists of token ids."""
    data = [Prompt(i, f"{i}+1=", [i, 43, 151_643], {"label": str(i + 1)}) for i in range(3)]
    answer = Prompt(0, "a", [7], {"label": Answer(TokenIds([52, 258]), [True, False])})
    assert (digest(data), digest([answer])) == ("a11e98a28f4d9b49", "9b60cce8bf0cff91")


def test_every_name_is_a_setting():
    assert {*FIXED, *FIXED_WITH_FROZEN} | NO_EFFECT_ON_NUMBERS <= set(section_of_field())


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("seed", 7, "--seed was 42, is 7"),
        ("rollout_batch_size", 64, "--rollout_batch_size was 128, is 64"),
        ("n_samples_per_prompt", 4, "--n_samples_per_prompt was 8, is 4"),
        ("train_batch_size", 32, "--train_batch_size was 1024, is 32"),
        ("max_epochs", 2, "--max_epochs was 1, is 2"),
        ("advantage_estimator", "rloo", "--advantage_estimator was 'grpo', is 'rloo'"),
        ("optimizer", "muon", "--optimizer was 'adamw', is 'muon'"),
    ],
)
def test_what_the_course_depends_on_may_not_change(name, value, says):
    assert says in refusal(of(**{name: value}))


@pytest.mark.parametrize(
    "name, value",
    [
        ("pretrain", "other"),
        ("lora_alpha", 4.0),
        ("lora_rank_pattern", '{"q_proj": 2}'),
        ("lora_alpha_pattern", '{"q_proj": 2}'),
        ("rslora", True),
        ("lora_lr_ratio", 2.0),
        ("target_modules", ["q_proj"]),
    ],
)
def test_adapters_belong_to_their_base(name, value):
    """A checkpoint of adapters has no other weights in it."""
    assert f"--{name} was" in refusal(of(lora_rank=4, **{name: value}), of(lora_rank=4))
    # said, and allowed, where all is in it
    assert f"--{name} was" in changed_settings(of(), of(**{name: value}))[0]
    assert "--lora_rank was 4, is 8" in refusal(of(lora_rank=8), of(lora_rank=4))
    assert "--lora_rank was 0, is 4" in refusal(of(lora_rank=4))


def test_towers_belong_to_their_base():
    """They are not trained, and so not in checkpoints."""
    seeing = Qwen2_5_VLConfig()
    assert "--pretrain was '', is 'other'" in refusal(
        of(model=seeing, pretrain="other"), of(model=seeing)
    )


def test_all_reasons_are_named_at_once():
    assert refusal(of(rows(100), seed=1, max_epochs=2)).count("\n") == 2


def test_what_may_change_is_said_and_what_no_number_depends_on_is_not():
    now = of(
        learning_rate=1e-5,
        adam_betas=[0.9, 0.99],
        save_steps=5,
        logging_steps=3,
        ckpt_path="elsewhere",
    )
    rate = "--learning_rate was 1e-06, is 1e-05"
    betas = "--adam_betas was [0.9, 0.95], is [0.9, 0.99]"
    assert changed_settings(of(), now) == [rate, betas]

    assert changed_settings(of(), of(prompt_data="moved.jsonl")) == [
        "--prompt_data was '', is 'moved.jsonl'"
    ]
    assert changed_settings(of(), of()) == []


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda data: data[:150], "the training data had 200 rows, has 150"),
        (
            lambda data: [*data[:70], replace(data[70], text="70 + 1="), *data[71:]],
            "first in the rows 69 to 71 of 200",
        ),
        (
            lambda data: [*data[:70], replace(data[70], token_ids=[1, 2]), *data[71:]],
            "first in the rows 69 to 71 of 200",
        ),
        (
            lambda data: [*data[:70], replace(data[70], columns={"label": "0"}), *data[71:]],
            "first in the rows 69 to 71 of 200",
        ),
        (lambda data: [data[1], data[0], *data[2:]], "first in the rows 1 to 3 of 200"),
    ],
)
def test_changed_data_is_found(change, says):
    assert says in refusal(of(change(rows())))


def test_columns_of_any_kind_are_the_same_in_every_process():
    """The repr of an object may hold an address; bytes count by content."""
    data = [
        [replace(rows(1)[0], columns={"image": object(), "raw": raw})] for raw in (b"a", b"a", b"b")
    ]
    assert changed_settings(of(data[0]), of(data[1])) == []
    assert "has changed" in refusal(of(data[2]), of(data[0]))


def test_a_model_of_another_shape_is_named_and_where_it_lies_is_not():
    here = Qwen3Config(name_or_path="here")
    there = Qwen3Config(name_or_path="there", dtype="float32")
    assert changed_settings(of(model=here), of(model=there)) == []
    assert "the model's hidden_size was 4096, is 64" in refusal(
        of(model=Qwen3Config(hidden_size=64))
    )
    assert not NOT_THE_MODEL & of()["model"].keys()


def test_what_another_version_does_not_know_is_no_change():
    before = of()
    del before["settings"]["seed"], before["model"]["hidden_size"]
    assert changed_settings(before, of(seed=3)) == []


def test_the_weights_of_a_base_are_known_by_their_content(tmp_path):
    folder = tiny_model(tmp_path / "model")
    before = weights_of(folder)
    assert before and before == weights_of(tiny_model(tmp_path / "again")) != weights_of(
        tiny_model(tmp_path / "other", seed=1)
    )
    model = Qwen3ForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[:8] += 1e-3
    model.save_pretrained(folder)
    assert weights_of(folder) != before
    assert [weights_of(name) for name in ("", "owner/name", "no name at all")] == ["", "", ""]


def test_changed_weights_of_a_base_are_refused_or_said():
    before, now = (
        {**of(**settings), "weights": {"actor": each}}
        for each, settings in (("a", {"lora_rank": 4}), ("b", {"lora_rank": 4}))
    )
    assert "the weights of the actor's base model have changed" in refusal(now, before)
    before, now = ({**of(init_kl_coef=0.1), "weights": {"actor": each}} for each in "ab")
    assert changed_settings(before, now) == [
        "the weights of --pretrain, the reference of the divergence, have changed"
    ]
    before, now = ({**of(), "weights": {"actor": each}} for each in "ab")
    assert changed_settings(before, now) == [], "all weights are in the checkpoint"


def test_rows_are_drawn_with_the_same_probabilities():
    before = of()
    now = of()
    before["probabilities"], now["probabilities"] = [0.7, 0.3], [0.5, 0.5]
    with pytest.raises(
        ConfigError, match=r"the probabilities of the data sets were .0.7, 0.3., are .0.5, 0.5."
    ):
        changed_settings(before, now)
