"""Why: whoever rents a cluster by a wrong table pays for it.

tests/bench/test_memory.py has what real ranks take.
"""

import json
import math
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightrft.config import Config
from lightrft.config.command_line import parse
from lightrft.config.errors import ConfigError
from lightrft.config.resolve import resolve
from lightrft.extras.commands.plan import amount, main
from lightrft.extras.tools.planning import Planner
from lightrft.extras.tools.shapes import known_config, model_config
from lightrft.extras.tools.step_memory import (
    TRACED_LAYERS,
    fake_group,
    layer_period,
    num_parameters,
    of_tensor_parallel,
    parameter_counts,
    step_bytes,
    with_layers,
)
from lightrft.extras.tools.step_time import ModelSizes, StepWork, Traffic, seconds
from lightrft.models.parallel.peaks import DEVICES
from lightrft.strategy.checkpoint.model_folders import name_folders
from ranks import run_ranks
from tiny import tiny_hybrid, tiny_model
from warm import warm_python

ROOT = Path(__file__).resolve().parents[3]


def shallow(folder: Path, name: str) -> str:
    """Write the configuration of a known model with so few layers that its plan is one trace."""
    with_layers(known_config(name), TRACED_LAYERS[0]).save_pretrained(folder)
    return str(folder)


CONFIG = str(ROOT / "configs" / "grpo_gsm8k_qwen2.5_7b.yaml")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B", 0.494),
        ("Qwen/Qwen2.5-7B-Instruct", 7.616),
        ("Qwen/Qwen2.5-72B", 72.706),
        ("Qwen/Qwen3-8B", 8.191),
        ("Qwen/Qwen3-0.6B", 0.596),
        ("meta-llama/Llama-3.1-8B", 8.030),
        ("Qwen/Qwen3-30B-A3B", 30.532),
    ],
)
def test_known_shapes_have_their_parameters(name, billions):
    """The numbers come from the models' pages on the hub."""
    assert num_parameters(known_config(name)) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_experts_by_hand():
    """A token has 8 of 128 experts of a layer, so two tokens have 15.5 on average.

    Every token has all other parameters.
    """
    shape = known_config("Qwen/Qwen3-30B-A3B")
    device = DEVICES["h100"]
    none = StepWork(0, 0, 1, 1, 1, True)
    parameters, active = parameter_counts(shape)
    model = ModelSizes(shape, parameters, active, 2)
    expert = 48 * 3 * 2048 * 768
    assert (
        parameters - active == 120 * expert
        and num_parameters(known_config("Qwen/Qwen3-235B-A22B")) // 10**9 == 235
    )

    # On average half of the samples are still decoded.
    for samples, chosen in ((2, 8), (4, 15.5)):
        found = seconds(
            model,
            replace(none, samples=samples),
            device,
            training=1,
            scoring=1,
            engines=1,
            engine_tp=1,
            cache_tokens=1e6,
        )
        weights = 2 * (parameters - (128 - chosen) * expert)
        read = 2 * weights + samples * model.cache_bytes() / 2
        assert found["generate"] == pytest.approx(read / (0.6 * 3.35e12) + samples * 8e-6)
        assert found["train"] == pytest.approx(
            3 * samples * (2 * active + 2 * 48 * 32 * 128) / (0.25 * 989e12)
        )


def test_unknown_names_are_not_guessed():
    for name in (
        "Qwen/Qwen2.5-7B-Instruct-GPTQ",
        "someone/Qwen2.5-7B",
        "Qwen/Qwen2.5-VL-7B-Instruct",
    ):
        assert known_config(name) is None
    assert known_config("Qwen/Qwen2.5-Math-7B").hidden_size == 3584


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ("grpo_geometry_qwen2.5_vl_7b", "--images_key images"),
        ("grpo_audio_qwen2_audio_7b", "--audios_key audio"),
    ],
)
def test_runs_with_media_are_refused_with_the_reason(capsys, config, flag):
    """Once they were planned as a text model whose name begins alike, with wrong numbers."""
    with pytest.raises(SystemExit) as ended:
        main([str(ROOT / "configs" / f"{config}.yaml"), "--ranks", "8"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and flag in said and "cannot be planned" in said


def test_tensor_parallel_shards_match_the_layers():
    """For 7B: matrices are halved, norms are not, and biases of queries, keys and values are."""
    shape = known_config("Qwen/Qwen2.5-7B")
    matrices = (
        28 * (3584 * (3584 + 2 * 512 + 3584 + 3 * 18944) + 3584 + 2 * 512) + 2 * 152064 * 3584
    )
    assert num_parameters(shape) == matrices + (2 * 28 + 1) * 3584
    assert num_parameters(of_tensor_parallel(shape, 2)) == matrices // 2 + (2 * 28 + 1) * 3584


def test_seconds_by_hand():
    """One rank, and one engine that decodes all four samples together.

    The longest has twice the mean of 10 tokens, and each of the 20 steps reads all weights.
    """
    shape = known_config("Qwen/Qwen2.5-7B")
    device = DEVICES["h100"]
    parameters = num_parameters(shape)
    model = ModelSizes(shape, parameters, parameters, 2)
    found = seconds(
        model,
        StepWork(4, 0, 10, 1, 1, True),
        device,
        training=1,
        scoring=1,
        engines=1,
        engine_tp=1,
        cache_tokens=1e6,
    )
    cache = 4 * 10 * 5 * model.cache_bytes()
    assert model.cache_bytes() == 2 * 28 * 4 * 128 * 2
    read = 20 * 2 * parameters + cache
    assert found["generate"] == pytest.approx(read / (0.6 * 3.35e12) + 40 * 8e-6)
    forward = 40 * (2 * parameters + 2 * 28 * 28 * 128 * 10) / (0.35 * 989e12)
    assert found["log-probs"] == pytest.approx(forward)
    assert found["train"] == pytest.approx(3 * forward * 0.35 / 0.31)


def test_an_engine_of_several_ranks_sums_over_them_twice_in_each_layer():
    """Eight samples in turns of four: ten steps with all places taken, and 20 at the end."""
    shape = known_config("Qwen/Qwen2.5-7B")
    parameters = num_parameters(shape)
    model = ModelSizes(shape, parameters, parameters, 2)
    work, device = StepWork(8, 0, 10, 0, 1, False), DEVICES["h100"]
    options = {"training": 1, "scoring": 1, "engines": 1}
    alone, two = (
        seconds(model, work, device, engine_tp=tp, cache_tokens=40, **options)["generate"]
        for tp in (1, 2)
    )
    sampled = 80 * 8e-6
    sums = 30 * 2 * 28 * (12e-6 + 4 * 3584 * 2 / (0.6 * 450e9))
    assert two == pytest.approx((alone - sampled) / 2 + sampled + sums)
    assert alone == pytest.approx(
        (30 * 2 * parameters + 8 * 10 * 5 * model.cache_bytes()) / (0.6 * 3.35e12) + sampled
    )


def test_a_mixture_takes_as_long_as_published():
    """NeMo-RL reports 1,102 tokens per second and GPU for 30B-A3B on 32 H100."""
    file = "configs/grpo_qwen3_30b_a3b.yaml"
    config = parse(["--config", file], "train_ppo")
    resolve(config, "train_ppo", world_size=32)
    shape = model_config(config.model.pretrain)
    planner = Planner(config, "train_ppo", 32, DEVICES["h100"], ranks_per_node=8, shape=shape)
    tokens = 128 * 8 * (512 + 4096) / 2
    speed = tokens / sum(planner.seconds(planner.cache_tokens()).values()) / 32
    assert speed == pytest.approx(1102, rel=0.25)


def test_training_reaches_the_share_that_is_published():
    """prime-rl reports 37 % of the peak of H200s for 4B and long sequences, without recomputation."""
    shape = known_config("Qwen/Qwen3-4B")
    parameters = num_parameters(shape)
    options = {"training": 8, "scoring": 8, "engines": 8, "engine_tp": 1, "cache_tokens": 1e6}
    work, device = StepWork(64, 0, 32768, 0, 1, 0.0), DEVICES["h200"]
    found = seconds(ModelSizes(shape, parameters, parameters, 2), work, device, **options)
    attention = 2 * 36 * 32 * 128 * 32768
    operations = 3 * 64 * 32768 * (2 * parameters + attention)
    assert operations / (found["train"] * 8 * 989e12) == pytest.approx(0.37, rel=0.1)


def test_traffic_by_hand():
    """Three micro-batches in one update: a gather for each pass, and a reduction for each."""
    traffic = Traffic(3, 1, gathered=20.0, reduced=40.0, gathers_once=False, reduces_once=False)
    assert traffic.of_updates(1) == 0
    assert traffic.of_updates(4) == (3 * 2 * 20 + 3 * 40) * 3 / 4
    assert replace(traffic, gathers_once=True).of_updates(4) == (2 * 20 + 3 * 40) * 3 / 4
    assert (
        replace(traffic, reduces_once=True, reduced=20.0).of_updates(4) == (3 * 2 * 20 + 20) * 3 / 4
    )
    assert traffic.between_replicas(4, 1) == 0 and traffic.between_replicas(4, 2) == 2 * 10 / 2


@pytest.mark.slow
def test_a_model_that_fits_on_every_device_is_advised_not_to_be_sharded():
    def advice(name: str, *flags: str) -> list[str]:
        config = parse(["--config", CONFIG, "--fsdp", "--bf16", *flags], "train_ppo")
        resolve(config, "train_ppo", world_size=8)
        shape = with_layers(known_config(name), TRACED_LAYERS[0])
        return (
            Planner(config, "train_ppo", 8, DEVICES["h100"], ranks_per_node=8, shape=shape)
            .plan()
            .advice
        )

    assert any("--dp_replicate 0" in line for line in advice("Qwen/Qwen2.5-0.5B"))
    assert advice("Qwen/Qwen2.5-0.5B", "--dp_replicate=0") == []


def test_experts_over_several_nodes_wait_for_the_network():
    """30B-A3B on 32 ranks gathers and reduces more than it computes, until told otherwise."""

    def train(*flags: str) -> float:
        config = parse(["--config", CONFIG, "--bf16", *flags], "train_ppo")
        resolve(config, "train_ppo", world_size=32)
        shape = known_config("Qwen/Qwen3-30B-A3B")
        planner = Planner(config, "train_ppo", 32, DEVICES["h100"], ranks_per_node=8, shape=shape)
        return planner.seconds(1e6)["train"]

    plain = train("--fsdp")
    assert train("--fsdp", "--reduce_dtype=bf16") == pytest.approx(plain * 3 / 4)
    assert train("--fsdp", "--dp_replicate=4") < plain / 2


def divided(ranks: int, ep: int, layers: int = 48) -> Planner:
    flags = ["--fsdp", "--bf16", "--gradient_checkpointing", f"--ep_size={ep}"]
    config = parse(["--config", CONFIG, *flags], "train_ppo")
    resolve(config, "train_ppo", world_size=ranks)
    shape = with_layers(known_config("Qwen/Qwen3-30B-A3B"), layers)
    return Planner(config, "train_ppo", ranks, DEVICES["h100"], ranks_per_node=8, shape=shape)


def test_divided_experts_by_hand():
    """Of 128 experts a rank gathers 16, and holds as large a share of all as without --ep_size."""

    experts = 48 * 128 * 3 * 2048 * 768
    plain = divided(32, 1)
    by_eight = divided(32, 8)
    assert plain.elsewhere == 0
    # The traced model has fewer rows in the routers, too.
    assert by_eight.elsewhere == pytest.approx(experts * 7 / 8, rel=1e-3)

    others = plain.sizes.parameters - experts
    gathered = others * 31 / 32 + experts / 8 * 3 / 4
    assert by_eight.received(by_eight.of_rank) * 31 / 32 == pytest.approx(gathered, rel=1e-2)
    alone = divided(8, 8)
    assert alone.received(alone.of_rank) == pytest.approx(others, rel=1e-2), (
        "nobody has the same experts"
    )

    work = StepWork(64, 100, 300, 1, 2, True)
    tokens = 64 * 400 / 32
    visits = tokens * 48 * 8 * 2048 * 2 * 2 * 7 / 8 / (DEVICES["h100"].link * 0.6)
    assert by_eight.visit_seconds(work) == pytest.approx(
        {"log-probs": visits, "train": 2 * 3 * visits}
    )
    assert by_eight.seconds(1e6)["train"] < plain.seconds(1e6)["train"] / 2


@pytest.mark.slow
def test_divided_experts_are_held_as_whole_ones_are():
    """A rank has a share of all masters, gradients and moments, however many experts it gathers."""
    planner = divided(32, 8, layers=3)
    step = planner.step(4096)
    share = 4 * planner.sizes.parameters / 32
    assert step.parameters == pytest.approx(share, rel=1e-3)
    assert step.gradients == pytest.approx(share, rel=1e-3)
    assert step.optimizer == pytest.approx(2 * share, rel=1e-3)


@pytest.mark.slow
def test_states_of_optimizers():
    config = known_config("Qwen/Qwen2.5-0.5B")
    options = {"fsdp": True, "bf16": True, "gradient_checkpointing": True, "optimizer": "muon"}
    found = step_bytes(with_layers(config, 3), options, world=2, tokens=64)
    # Attention has 14 heads of 64, and 2 for keys and values; feed-forward layers have 4,864.
    matrices = 3 * 896 * (2 * 896 + 2 * 128 + 3 * 4864)
    others = num_parameters(with_layers(config, 3)) - matrices
    assert found.optimizer == pytest.approx((4 * matrices + 8 * others) / 2, rel=1e-3)

    # 896 is no multiple of 256, and 4,864 is.
    quantized = 3 * 896 * 4864
    found = step_bytes(
        with_layers(config, 3), options | {"optimizer": "adamw_8bit"}, world=2, tokens=64
    )
    elements = 2.03125 * quantized + 8 * (matrices + others - quantized)
    assert found.optimizer == pytest.approx(elements / 2, rel=1e-3)


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main([CONFIG, "--ranks", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and found["fits"] and not found["advice"]
    train = found["phases"]["train"]
    share = 7.616e9 / 8
    assert [train[name] for name in ("parameters", "gradients", "optimizer")] == pytest.approx(
        [4 * share, 4 * share, 8 * share], rel=1e-3
    )
    # 2 bytes, on two ranks
    assert found["phases"]["generate"]["engine's weights"] == pytest.approx(7.616e9, rel=1e-3)

    wide = shallow(tmp_path, "Qwen/Qwen2.5-14B")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                CONFIG,
                "--ranks",
                "8",
                "--json",
                "--pretrain",
                wide,
                "--offload_idle=false",
                "--max_tokens_per_microbatch=262144",
            ]
        )

    found = json.loads(capsys.readouterr().out)
    assert (
        ended.value.code == 2
        and not found["fits"]
        and found["advice"][0].startswith("it fits with --")
    )

    flags = found["advice"][0].removeprefix("it fits with ").split()
    with pytest.raises(SystemExit) as ended:
        main(
            [
                CONFIG,
                "--ranks",
                "8",
                "--json",
                "--pretrain",
                wide,
                "--offload_idle=false",
                "--max_tokens_per_microbatch=262144",
                *flags,
            ]
        )

    assert ended.value.code == 0 and json.loads(capsys.readouterr().out)["fits"]


def test_a_policy_of_recomputation_counts_only_with_it() -> None:
    """Otherwise a plan would leave out inputs that are not in host memory."""
    found: dict[str, list] = {"true": [], "false": []}
    shape = with_layers(known_config("Qwen/Qwen2.5-0.5B"), TRACED_LAYERS[0])
    for recomputes, plans in found.items():
        for policy in ("full", "selective", "offload"):
            flags = [f"--gradient_checkpointing={recomputes}"]
            flags += ["--gradient_checkpointing_policy", policy]
            config = parse(["--config", CONFIG, *flags], "train_ppo")
            planner = Planner(
                config, "train_ppo", 8, DEVICES["h100"], ranks_per_node=8, shape=shape
            )
            plans.append((planner.step(4096).peak, planner.recomputed()))
    assert found["false"] == [(found["false"][0][0], 0.0)] * 3
    assert len(set(found["true"])) == 3


def test_ranks_without_work_add_no_speed():
    """1,024 ranks have 512 engines and 1,024 replicas, for 128 prompts and 512 rows.

    They are as fast as only the ranks that have work, if transfers take no time.
    """
    device = replace(DEVICES["h100"], link=math.inf, network=math.inf)

    def planner(ranks: int, *flags: str) -> Planner:
        config = parse(["--config", CONFIG, *flags], "train_ppo")
        resolve(config, "train_ppo", world_size=ranks)
        return Planner(
            config,
            "train_ppo",
            ranks,
            device,
            ranks_per_node=8,
            shape=model_config(config.model.pretrain),
        )

    many = planner(1024)
    seconds = many.seconds(1e6)
    with_work = planner(512).seconds(1e6)
    assert seconds["train"] == with_work["train"] and seconds["generate"] == with_work["generate"]
    assert (
        seconds["generate"]
        == planner(256).seconds(1e6)["generate"]
        < planner(128).seconds(1e6)["generate"]
    )

    assert seconds["log-probs"] == pytest.approx(with_work["log-probs"] / 2), (
        "all 1,024 samples are scored at once"
    )
    rows, prompts = many.idle_ranks()
    assert "512 of 1024 replicas" in rows and "128 of 512 engines" in prompts
    assert planner(256).idle_ranks() == planner(512, "--rollout_batch_size=256").idle_ranks() == []


@pytest.mark.slow
def test_the_plan_of_32_nodes(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                CONFIG,
                "--ranks",
                "64",
                "--ranks_per_node=2",
                "--json",
                "--pretrain",
                shallow(tmp_path, "Qwen/Qwen2.5-72B"),
                "--train_batch_size=32",
                "--rollout_batch_size=16",
            ]
        )

    found = json.loads(capsys.readouterr().out)
    rows, prompts, nodes = found["advice"]
    assert (
        ended.value.code == 0
        and rows.startswith("--train_batch_size 32")
        and prompts.startswith("--rollout_batch_size 16")
    )
    assert "--dp_replicate 32 gathers parameters within each of the 32 nodes" in nodes


def test_all_problems_are_named(capsys):
    """Problems of an input, a reward, a bound, the layout and the batches.

    Sizes are not divided where one is out of its range.
    """
    with pytest.raises(SystemExit) as ended:
        main(
            [
                CONFIG,
                "--ranks",
                "6",
                "--tp_size",
                "4",
                "--train_batch_size",
                "7",
                "--pretrain=/nowhere",
                "--top_p=0",
                "--reward=gsm8k,gsm8k",
            ]
        )

    said = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "--tp_size 4 does not divide the 6 processes" in said
        and "train_batch_size 7" in said
    )
    assert (
        "/nowhere: no such folder" in said
        and "--top_p must be" in said
        and "two rewards are called gsm8k" in said
    )
    with pytest.raises(SystemExit):
        main([CONFIG, "--ranks", "6", "--tp_size", "0", "--train_batch_size", "0"])
    said = capsys.readouterr().err
    assert "--tp_size must be" in said and "--train_batch_size must be" in said


def test_a_plan_needs_a_rank(capsys):
    with pytest.raises(SystemExit) as ended:
        main([CONFIG, "--ranks", "0"])
    assert (
        ended.value.code == 2
        and capsys.readouterr().err == "--ranks and --ranks_per_node must be at least 1\n"
    )


@pytest.mark.slow
def test_a_hybrid_has_a_plan(tmp_path):
    """Its layers count by their kind: one in four has keys and values."""
    (tmp_path / "d.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    folder = tiny_hybrid(tmp_path / "model")
    shape = model_config(folder)
    assert layer_period(shape) == 4
    assert ModelSizes(shape, 1, 1, 2).cache_bytes() == 2 * 1 * 2 * 32 * 2

    config = parse(
        [f"--pretrain={folder}", f"--prompt_data={tmp_path / 'd.jsonl'}", "--fsdp"], "train_sft"
    )
    resolve(config, "train_sft", world_size=1)
    planner = Planner(config, "train_sft", 1, DEVICES["h100"], ranks_per_node=8, shape=shape)
    train = planner.phases(planner.step(1024), 1024)["train"]
    kept = [train[name] for name in ("parameters", "gradients", "optimizer")]
    numel = num_parameters(shape)
    assert kept == pytest.approx([4 * numel, 4 * numel, 8 * numel], rel=0.01)
    assert train["activations"] > 0


@pytest.mark.parametrize("bits", ["none", "int8", "fp8"])
def test_an_engine_of_eight_bits_is_smaller(tmp_path, bits):
    """Embedding and head keep two bytes."""
    (tmp_path / "d.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    folder = tiny_model(tmp_path / "model")
    shape = model_config(folder)
    flags = [f"--pretrain={folder}", f"--prompt_data={tmp_path / 'd.jsonl'}", "--engine_type=vllm"]
    flags += ["--prompt_max_len=64", "--generate_max_len=64"]
    config = parse([*flags, "--fsdp", "--bf16", f"--rollout_quantization={bits}"], "train_ppo")
    resolve(config, "train_ppo", world_size=1)
    planner = Planner(config, "train_ppo", 1, DEVICES["h100"], ranks_per_node=8, shape=shape)
    tables = 2 * shape.vocab_size * shape.hidden_size
    matrices = num_parameters(shape) - tables
    width = 2 if bits == "none" else 1
    assert planner.engine_weights() == width * matrices + 2 * tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "tied"),
    [([], False), ([], True), (["--tp_size=2"], False)],
    ids=["one rank", "tied", "one shard"],
)
def test_ranks_that_share_with_nobody_have_a_plan(tmp_path, flags, tied):
    """Every rank holds all that it trains.

    Itself and its gradient take 4 bytes a parameter, and AdamW takes 8.
    """
    (tmp_path / "d.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    # a plan of so many layers is one trace
    folder = tiny_model(tmp_path / "model", tie=tied, layers=TRACED_LAYERS[0])
    config = parse(
        [f"--pretrain={folder}", f"--prompt_data={tmp_path / 'd.jsonl'}", "--fsdp", *flags],
        "train_sft",
    )
    tp = config.strategy.tp_size
    shape = model_config(str(folder))
    resolve(config, "train_sft", world_size=tp)
    planner = Planner(config, "train_sft", tp, DEVICES["h100"], ranks_per_node=8, shape=shape)
    step = planner.step(1024)
    numel = num_parameters(of_tensor_parallel(shape, tp) if tp > 1 else shape)
    train = planner.phases(step, 1024)["train"]
    kept = [train[name] for name in ("parameters", "gradients", "optimizer")]
    assert kept == pytest.approx([4 * numel, 4 * numel, 8 * numel], rel=0.01)


@pytest.mark.slow
def test_a_dry_run_trains_nothing(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    folder = tiny_model(tmp_path / "model", layers=TRACED_LAYERS[0])
    flags = [
        f"--pretrain={folder}",
        f"--prompt_data={tmp_path / 'd.jsonl'}",
        "--fsdp",
        "--dry_run",
        "--train_batch_size=2",
        f"--save_path={tmp_path / 'run'}",
    ]
    command = [
        warm_python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
    ]
    ran = subprocess.run(
        [*command, "lightrft", "train_sft", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0 and ran.stdout.count("it fits") == 1, ran.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "some/model"])
def test_without_a_network_nobody_waits_for_the_hub(monkeypatch, name):
    """Of a model whose shape is known, it is not even asked."""
    asked = []

    def without_a_network(host, *args, **options):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", without_a_network)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    began = time.monotonic()
    name_folders(Config.of(pretrain=name), local=True)
    if name == "some/model":
        with pytest.raises(ConfigError, match=f"--pretrain {name}: its config.json cannot be"):
            model_config(name)
    else:
        assert model_config(name).num_hidden_layers in (28, 48) and not asked
    assert time.monotonic() - began < 5


AMOUNTS = {157_120: "157,120", 34_500_000: "34.5 million", 7_615_000_000: "7.62 billion"}


@pytest.mark.parametrize(("number", "text"), AMOUNTS.items())
def test_amounts_are_for_people(number, text):
    assert amount(number) == text


def offset_of_shard() -> int:
    """Return where this rank's part of a vector begins, after an operation of torch."""
    vector = DTensor.from_local(torch.ones(64), init_device_mesh("cpu", (2,)), [Shard(0)])
    doubled = 2 * vector
    _, offset = compute_local_shape_and_global_offset(
        doubled.shape, doubled.device_mesh, doubled.placements
    )
    return offset[0]


def test_a_plan_leaves_no_layouts_of_its_rank_behind():
    """torch keeps the layout of a result, and ranks are forked from this process."""
    with fake_group(2):
        assert offset_of_shard() == 0

    assert run_ranks(2, offset_of_shard) == [0, 64]
