"""A prepared configuration: recipes are expanded, what was written wins, and what nothing reads is
said.
"""

import pytest
from loguru import logger

from lightrft.app.run.prepare import prepare_config
from lightrft.config import Config, ConfigError, parse

RUNNABLE = ["--pretrain=some/model", "--prompt_data=some/rows"]


@pytest.fixture
def said():
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)


def read(*argv: str) -> Config:
    return prepare_config("train_ppo", parse([*RUNNABLE, *argv]))


def bounds(*argv: str) -> tuple[float, float]:
    algorithm = read(*argv).algorithm
    return algorithm.eps_clip_low, algorithm.eps_clip_high


def test_one_bound_for_both_sides_unless_a_side_has_its_own():
    assert bounds("--eps_clip=0.3") == (0.3, 0.3)
    assert bounds("--eps_clip=0.3", "--eps_clip_high=0.4") == (0.3, 0.4)
    assert bounds("--eps_clip_low=0.1") == (0.1, 0.2)


def test_the_name_of_a_correction_brings_its_bounds():
    algorithm = read("--rollout_correction=icepop").algorithm
    assert (algorithm.rollout_correction_low, algorithm.rollout_correction_high) == (0.5, 5.0)
    algorithm = read("--rollout_correction=icepop", "--rollout_correction_high=3").algorithm
    assert (algorithm.rollout_correction_low, algorithm.rollout_correction_high) == (0.5, 3.0)
    assert read("--rollout_correction=mis").algorithm.rollout_correction_high == 2.0


@pytest.mark.parametrize(
    ("argv", "warning"),
    [
        (
            ["--policy_loss=cispo", "--dual_clip=3"],
            "--dual_clip has no effect with --policy_loss cispo",
        ),
        (
            ["--policy_loss=sapo", "--eps_clip_low=0.1"],
            "--eps_clip_low has no effect with --policy_loss sapo",
        ),
        (
            ["--policy_loss=sapo", "--eps_clip=0.1"],
            "--eps_clip has no effect with --policy_loss sapo",
        ),
        (["--cov_ratio=0.1"], "--cov_ratio has no effect with --policy_loss ppo"),
        (
            ["--policy_loss=kl_cov", "--clip_cov_range", "1", "2"],
            "--clip_cov_range has no effect with --policy_loss kl_cov",
        ),
        (["--pass_k=2"], "--pass_k has no effect with --advantage_estimator grpo"),
        (
            ["--rollout_correction=tis", "--rollout_correction_low=0.1"],
            "no effect with --rollout_correction tis",
        ),
    ],
)
def test_what_the_chosen_function_does_not_read(said, argv, warning):
    read(*argv)
    assert any(warning in line for line in said), said


def test_what_it_reads_is_not_mentioned(said):
    read(
        "--policy_loss=clip_cov",
        "--cov_ratio=0.1",
        "--clip_cov_range",
        "1",
        "2",
        "--eps_clip_low=0.1",
    )
    read("--policy_loss=sapo", "--sapo_tau_positive=2")
    read("--policy_loss=gspo", "--eps_clip=0.1")
    assert said == []


@pytest.mark.parametrize("estimator", ["grpo", "dapo", "sapo", "ppo"])
def test_a_resolved_configuration_reads_back_without_a_word(said, tmp_path, estimator):
    config = read("--fsdp", f"--advantage_estimator={estimator}")
    config.write(tmp_path / "config.yaml")
    assert read(f"--config={tmp_path / 'config.yaml'}") == config and said == []


@pytest.mark.parametrize("flag", ["advantage_estimator", "policy_loss", "rollout_correction"])
def test_a_name_that_does_not_exist_is_an_error_of_the_user(flag):
    with pytest.raises(ConfigError, match=f"--{flag} nothing: no .* of this name"):
        read(f"--{flag}=nothing")
