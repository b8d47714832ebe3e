"""Flags of other programs mean on the command line what they mean there."""

import pytest

from lightrft.app.cli import read_command_line
from lightrft.config import ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train_data", "x"], "unknown flag --train_data; write --prompt_data"),
        (["--lr=1"], "unknown flag --lr; write --learning_rate"),
        (
            ["--packing_samples", "perhaps"],
            "--packing_samples perhaps: the flag takes no value, or true or false",
        ),
    ],
)
def test_errors_name_the_flag_to_write(argv, message):
    with pytest.raises(ConfigError) as error:
        read_command_line(argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "report_to"),
    [
        (["--no_use_tensorboard"], "jsonl"),
        (["--use_tensorboard", "true"], "tensorboard"),
        (["--use_wandb"], "tensorboard,wandb"),
        (["--use_tensorboard=false", "--use_wandb"], "jsonl,wandb"),
        (["--report_to=mlflow,jsonl", "--use_wandb"], "mlflow,jsonl,wandb"),
        (["--report_to=wandb", "--no_use_wandb"], "jsonl"),
    ],
)
def test_switches_of_trackers_add_and_remove_destinations(argv, report_to):
    config = read_command_line(argv)
    assert config.observe.report_to == report_to
    assert f"the switches of trackers are --report_to {report_to}" in config.notices[0]


def test_a_switch_of_trackers_keeps_the_destinations_of_a_file(file):
    path = file("observe:\n  report_to: [tensorboard, mlflow]\n  wandb_project: mine\n")
    config = read_command_line(["--config", path, "--use_tensorboard", "false"])
    assert config.observe.report_to == "mlflow" and config.observe.tracker_project == "mine"


def test_other_spellings_count_as_written():
    config = read_command_line(
        ["--eps-clip-low", "0.1", "--no-use-tensorboard", "--disable_engine_sleep"]
    )
    assert config.written == {"eps_clip_low", "report_to", "enable_engine_sleep"}
    assert config.observe.report_to == "jsonl" and not config.engine.enable_engine_sleep
    config.expand({"eps_clip_low": 0.2})
    assert config.algorithm.eps_clip_low == 0.1


def test_flags_of_other_launch_scripts():
    config = read_command_line(
        [
            "--remote_rm_url=http://a:1/b?c=d",
            "--disable_engine_sleep",
            "--packing_samples",
            "--flash_attn",
            "--use_fire",
        ]
    )
    assert config.reward.reward == "http://a:1/b?c=d" and not config.engine.enable_engine_sleep
    assert config.train.batching == "packed" and config.rollout.first_token_temperature == 10
    assert {
        "reward",
        "batching",
        "enable_engine_sleep",
        "first_token_temperature",
    } <= config.written

    assert (
        read_command_line(
            ["--first_token_temperature", "5", "--use_fire"]
        ).rollout.first_token_temperature
        == 5
    )
    assert read_command_line(
        ["--flash_attn", "true", "--use_fire=True", "--seed", "7"]
    ) == read_command_line(["--use_fire", "--seed", "7"])
