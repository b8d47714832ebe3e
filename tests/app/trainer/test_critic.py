"""Whole runs of PPO with a critic: both learn, under every strategy and layout, and a run that ends
goes on.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from algorithms.roles.rows import dense_scorer
from app.trainer.in_turn import train_and_resume, train_in_turn
from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.app.run.prepare import prepare_config
from lightrft.app.run.run import Run
from lightrft.app.trainer.build_roles import build_critic
from lightrft.config import Config, parse
from lightrft.models.load import load_tokenizer
from lightrft.strategy import get_strategy
from ranks import run_cases
from runs import PPO, prepare, repeatable, train
from strategy.zero import DeepSpeedStrategy

REWARD = '''
def by_prompt(samples, label, **columns):
    """The share of ASCII bytes, and one more for prompts of an odd length, which a critic can know."""
    return [sum(token < 128 for token in s.token_ids) / len(s.token_ids) + len(s.prompt.token_ids) % 2 for s in samples]
'''
CRITIC = ["--advantage_estimator=ppo", "--critic_learning_rate=1e-3", "--train_batch_size=16"]
"""Two updates of each in a step."""
LORA = ["--lora_rank=8", "--lora_alpha=32", "--lora_dropout=0.1"]
ZERO = ["--fsdp=false", "--zero_stage=3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    assert DeepSpeedStrategy
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    (folder / "reward.py").write_text(REWARD)
    return [*flags, f"--reward={folder / 'reward.py'}:by_prompt"]


@pytest.mark.slow
def test_the_reward_rises_and_the_critic_explains_it(inputs, tmp_path):
    """Every prompt once in a step, so that the mean reward moves by the responses alone."""
    flags = [
        "--n_samples_per_prompt=1",
        "--rollout_batch_size=24",
        "--train_batch_size=12",
        "--max_steps=20",
    ]
    rows = train("train_ppo", 1, [*inputs, *PPO, *CRITIC, *flags], tmp_path)
    rewards, explained = (
        [row[name] for row in rows] for name in ("rollout/reward", "critic/explained_variance")
    )
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 4 * 0.15, rewards
    assert max(explained[:3]) < 0 and min(explained[-4:]) > 0.5, explained
    assert rows[-1]["critic/loss"] < 0.1 * rows[0]["critic/loss"]
    assert all(row["critic/grad_norm"] > 0 and row["critic/learning_rate"] == 1e-3 for row in rows)


@pytest.fixture(scope="module")
def everything(inputs, tmp_path_factory) -> list[str]:
    """All that one run can have: a critic, a teacher, a reference, and answers beside samples."""
    teacher = tiny_qwen3(tmp_path_factory.mktemp("teacher"), seed=1)
    answers = inputs[2].partition("=")[2]
    added = [
        f"--teacher_pretrain={teacher}",
        "--distill_coef=0.2",
        f"--pretrain_data={answers}",
        "--init_kl_coef=0.05",
    ]
    return [*inputs, *PPO, *CRITIC, *added, "--max_steps=2"]


@pytest.mark.slow
def test_other_layouts_train_the_same(everything, tmp_path):
    layouts = [], ["--sp_size=2", "--offload_idle"], [*ZERO, "--offload_idle"]
    assert_alike(2, everything, layouts, tmp_path)


@pytest.mark.slow
def test_sequences_and_layers_divided_at_once(everything, tmp_path):
    """Four ranks of one data replica learn what four replicas learn.

    The engines, and so the samples, are the same.
    """
    layouts = [], ["--cp_size=2", "--tp_size=2", "--tp_sequence_parallel"]
    assert_alike(4, everything, layouts, tmp_path)


def assert_alike(ranks: int, flags: list[str], layouts: tuple[list[str], ...], folder: Path):
    runs = [([*flags, *more], folder / str(number)) for number, more in enumerate(layouts)]
    plain, *others = train_in_turn("train_ppo", ranks, runs)
    for rows in others:
        assert_same(rows, plain)


def assert_same(rows: list[dict], wanted: list[dict]) -> None:
    assert {"critic/loss", "rollout/teacher_kl", "train/ptx_loss", "train/kl"} <= rows[0].keys()
    for mine, expected in zip(repeatable(rows), repeatable(wanted), strict=True):
        assert mine.pop("engine/logprob_mismatch_max") < 1e-4
        assert mine == pytest.approx({name: expected[name] for name in mine}, rel=2e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], [*ZERO, "--offload_idle", *LORA]], ids=str)
def test_a_run_goes_on_with_the_same_numbers(inputs, tmp_path, options):
    """Three steps at once, and two and one, the first of them of the critic alone."""
    flags = [*inputs, *PPO, *CRITIC, "--freezing_actor_steps=1", *options]
    saving = [f"--ckpt_path={tmp_path / 'checkpoints'}", "--save_steps=2"]
    whole, resumed = train_and_resume("train_ppo", 2, flags, tmp_path, stop=2, end=3, saving=saving)
    assert repeatable(resumed) == repeatable(whole)

    for kind, result in (
        (AutoModelForCausalLM, "model"),
        (AutoModelForSequenceClassification, "critic"),
    ):
        found, expected = (
            load_file(tmp_path / run / result / "model.safetensors") for run in ("parts", "whole")
        )
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        loaded, info = kind.from_pretrained(tmp_path / "whole" / result, output_loading_info=True)
        assert not any(
            info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        assert loaded.config.architectures == [type(loaded).__name__]

    assert loaded.score.out_features == 1 and loaded.score.weight.std() > 0.01


@pytest.mark.slow
def test_first_the_critic_learns_alone(inputs, tmp_path):
    frozen = [
        "--freezing_actor_steps=2",
        "--max_steps=4",
        "--lr_scheduler=cosine",
        "--lr_warmup_ratio=0.5",
    ]
    flags = [*CRITIC, *frozen, "--save_steps=1", "--save_hf_ckpt", "--max_ckpt_num=9"]

    rows = train("train_ppo", 2, [*inputs, *PPO, *flags], tmp_path)
    start = load_file(Path(inputs[1].partition("=")[2]) / "model.safetensors")
    for step, row in enumerate(rows, 1):
        actor = load_file(tmp_path / "checkpoints" / f"step{step}" / "hf" / "model.safetensors")
        assert all(torch.equal(actor[name], start[name]) for name in start) == (step <= 2)
        assert ("train/loss" in row) == (step > 2) and row["critic/loss"] > 0

    # two updates in a step: four of the actor, two of them of warm-up; eight of the critic, four of
    # warm-up
    assert rows[2]["train/learning_rate"] == pytest.approx(3e-3 * (1 / 2 + 2 / 2) / 2)
    assert rows[0]["critic/learning_rate"] == pytest.approx(1e-3 * (1 / 4 + 2 / 4) / 2)


def test_a_run_that_never_trains_the_actor_is_refused(inputs, tmp_path):
    with pytest.raises(
        RuntimeError,
        match="--freezing_actor_steps 2 leaves no step to train the actor: this run has 2 steps",
    ):
        train(
            "train_ppo",
            1,
            [*inputs, *PPO, *CRITIC, "--freezing_actor_steps=2", "--max_steps=2"],
            tmp_path,
        )


# -- where the critic comes from


def made(flags: list[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
    config: Config = prepare_config("train_ppo", parse(flags, "train_ppo"))
    strategy = get_strategy(config)
    strategy.setup_distributed()
    critic = build_critic(Run(config, strategy, load_tokenizer(config.model)), updates=1)
    learned = [name for name, parameter in critic.module.hf_parameters() if parameter.requires_grad]
    weights = {name: tensor.clone() for name, tensor in strategy.full_params(critic.module)}
    strategy.close()
    return weights, learned


@pytest.mark.slow
def test_where_it_comes_from(inputs):
    folder = inputs[1].partition("=")[2]
    scored = dense_scorer(folder, 3)
    AutoTokenizer.from_pretrained(folder).save_pretrained(scored)

    flags = [*inputs, *PPO, *CRITIC]
    from_scored = [f"--critic_pretrain={scored}"]
    cases = [
        (pretrain, [*added, *strategy])
        for strategy in (["--fsdp"], ["--fsdp=false", "--zero_stage=2"])
        for pretrain, added in (
            (folder, []),
            (scored, from_scored),
            (scored, [*from_scored, *LORA]),
        )
    ]
    found = run_cases(
        2, made, {number: ([*flags, *added],) for number, (_, added) in enumerate(cases)}
    )
    for number, (pretrain, added) in enumerate(cases):
        stored = load_file(Path(pretrain) / "model.safetensors")
        (critic, learned), (other, _) = found[number]
        assert {
            name
            for name in critic
            if not torch.equal(critic[name], stored.get(name, torch.empty(0)))
        } <= {"score.weight"}
        assert (
            torch.equal(critic["score.weight"], other["score.weight"])
            and critic["score.weight"].std() > 0.01
        )

        assert ("score.weight" in stored) == torch.equal(
            critic["score.weight"], stored.get("score.weight", torch.empty(0))
        )
        assert all("lora" in name or name == "score.weight" for name in learned) == (
            LORA[0] in added
        )

    assert json.loads((Path(scored) / "config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
