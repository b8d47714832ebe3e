"""Why: a start value is only as good as its source, so each is told with the rule that it follows."""

import json

import pytest

from lightrft.config import Config
from lightrft.extras.commands.debug.diagnose import main as diagnose
from lightrft.extras.tune.advice import advice


def value(values: float | list[float], step: int) -> float:
    return values[step] if isinstance(values, list) else values


def advised(tmp_path, command: str, model: dict | None = None, noise: dict | None = None, **values):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(model or {"model_type": "mine"}))
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    rows = [
        {
            "step": step,
            **{f"noise/{name}": value(each, step) for name, each in (noise or {}).items()},
        }
        for step in range(3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.of(pretrain=str(folder), save_path=str(run), **values)
    return list(advice(config, command, ["--pretrain", str(folder)]))


@pytest.mark.parametrize(
    ("command", "lora_rank", "said"),
    [
        ("train_ppo", 0, "--learning_rate 1e-06: 1e-06 (the default of this program"),
        ("train_dpo", 0, "--learning_rate 5e-07: 5e-07 (Zephyr, arXiv 2310.16944)"),
        (
            "train_sft",
            8,
            "--learning_rate 0.0001: 1e-05 (LIMA, arXiv 2305.11206), times 10 for adapters",
        ),
    ],
)
def test_a_rate_has_the_source_of_the_method(tmp_path, command, lora_rank, said):
    lines = advised(tmp_path, command, lora_rank=lora_rank)

    assert lines[0].startswith(said)
    words = f"lightrft tune {command} --pretrain {tmp_path / 'model'} --over learning_rate="
    assert lines[2].startswith(f"    {words}")


def test_the_rule_for_the_hidden_size_is_of_the_family(tmp_path):
    llama = {"model_type": "llama", "hidden_size": 4096}
    lines = advised(tmp_path, "train_sft", llama, lora_rank=8)

    rate = 5e-5 * 10 * (2000 / 4096) ** 0.781
    assert lines[1].startswith(f"--learning_rate {rate:.2g}: 5e-05 x (2000 / 4096)^0.781, times 10")
    over = f"--over learning_rate={rate / 10**0.5:.1e}..{rate * 10**0.5:.1e}:log"
    assert lines[3].endswith(over)
    # it was measured for supervised fine-tuning, and not for other models
    assert len(lines) == 4
    other = {"model_type": "mine", "hidden_size": 64}
    assert len(advised(tmp_path, "train_sft", other)) == 3
    # the folder may have the name of another family
    qwen = {"model_type": "qwen3", "hidden_size": 4096}
    lines = advised(tmp_path / "llama-factory", "train_sft", qwen)
    assert "(2000 / 4096)^0.0775" in lines[1]
    assert "^" not in "".join(advised(tmp_path, "train_ppo", llama))


def test_the_batch_is_the_measured_noise_scale(tmp_path):
    noise = {"scale": 300.0, "prompts": 100.0, "samples": 200.0, "signal_to_noise": 0.2}
    batch, division = advised(tmp_path, "train_ppo", noise=noise)[-2:]

    assert batch.startswith("--train_batch_size 256: the noise scale was 300 samples.")
    assert division.startswith("--n_samples_per_prompt: a prompt adds 100 to the noise")
    assert "beyond 2 samples of a prompt" in division
    assert "--measure_noise 10" in advised(tmp_path, "train_ppo")[-1]
    for command in ("train_sft", "train_dpo"):  # which do not measure it
        assert "measure_noise" not in "".join(advised(tmp_path, command, noise=noise))


def test_diagnose_says_it_too(tmp_path, capsys):
    noise = {"noise/scale": 300.0, "noise/signal_to_noise": 0.2}
    for measured in ({}, noise):
        rows = [{"step": step, "rollout/reward": step / 40, **measured} for step in range(30)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(SystemExit):
            diagnose([str(tmp_path)])
        said = capsys.readouterr().out
        assert ("--train_batch_size 256: the noise scale was 300 samples." in said) == bool(
            measured
        )


def test_a_noise_without_a_signal_is_no_batch(tmp_path):
    assert "saw no signal" in advised(tmp_path, "train_ppo", noise={"signal_to_noise": 0.0})[-1]


def test_one_odd_measurement_does_not_move_the_batch(tmp_path):
    assert (
        "was 300 samples"
        in advised(
            tmp_path,
            "train_ppo",
            noise={"scale": [300.0, 280.0, 9e9], "signal_to_noise": [1, 1, 0]},
        )[-1]
    )
