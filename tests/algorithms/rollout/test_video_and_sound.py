"""Videos and sound from the data to the gradient: as plain transformers computes it sample by
sample, in every split.
"""

import io
import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForMultimodalLM,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.rollout.experience import flatten_for_run
from lightrft.algorithms.rollout.media_expansion import Expander
from lightrft.config import ModelSection
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt, Sample
from lightrft.data.media_files import (
    AUDIOS,
    IMAGES,
    VIDEOS,
    AudioFile,
    ImageFile,
    MediaFile,
    VideoFile,
)
from lightrft.models.heads import Actor
from lightrft.models.load import load_model, load_scorer
from lightrft.models.lora import freeze_parameters
from lightrft.strategy import get_strategy
from lightrft.strategy.batching.micro_batches import redistribute
from lightrft.strategy.checkpoint.hf_export import export_whole
from ranks import run_cases
from runs import train
from scripts.prepare_digits import recordings, tiny_qwen2_audio
from scripts.prepare_dots import films, tiny_qwen2_5_vl
from seeing import FILMED, FRAMED, hearing_model, omni, picture, seeing_qwen, transformers_model
from sglang_environment import in_sglang_environment

pytestmark = pytest.mark.slow

DRAWN = [
    (0, [5, 6, 7]),
    (0, [5, 9]),
    (1, [8, 9]),
    (2, [10, 11, 12]),
    (3, [14]),
    (2, [10, 11]),
    (0, [15]),
]
"""The prompt of each sample, and its response: samples of a prompt share its media."""
HELD = {1: [7], 2: [6, 1], 4: [3, 2, 1, 1]}
TRAINED = {"freeze_vision_tower": False}
CONSTANT = ("model.audio_tower.embed_positions.weight",)
"""Parameters that their model creates as constants; from_pretrained() forgets that."""
PACKED = {"max_tokens": 256}
APART = {"max_tokens": 80, "max_sequences": 1}
"""Limits of a micro-batch: it has several samples, or one."""


def clip(seed: int, seconds: float) -> AudioFile:
    return AudioFile(
        f"{seed}",
        (
            np.random.default_rng(seed).normal(0, 0.1, int(16000 * seconds)).astype(np.float32),
            16000,
        ),
    )


def film(seed: int, count: int) -> VideoFile:
    return VideoFile(
        f"{seed}", tuple(ImageFile(f"{number}", png(seed + number)) for number in range(count))
    )


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed, 60, 60).save(file, "PNG")
    return file.getvalue()


def prompts(expand: Expander) -> list[Prompt]:
    """Two media in one, a text, and one between letters."""
    media: list[dict[str, list[MediaFile]]]
    if AUDIOS in expand.media:
        marks = ["<|AUDIO|>", "<|AUDIO|>"]
        media = [{AUDIOS: [clip(1, 0.3)]}, {}, {AUDIOS: [clip(2, 0.2), clip(3, 0.5)]}, {}]
    else:
        both = {VIDEOS: [film(5, 2)], IMAGES: [ImageFile("9", png(9))]}
        marks = [FILMED, FRAMED]
        media = [{VIDEOS: [film(1, 4)]}, {}, both, {}]

    texts = [f"a{marks[0]}b", "cd", "".join(marks), "x"]
    tokenizer = expand.reader.processor.tokenizer
    return [
        Prompt(index, text, tokenizer(text)["input_ids"], multi_modal=media[index])
        for index, text in enumerate(texts)
    ]


def samples(expand: Expander) -> list[Sample]:
    given = prompts(expand)
    return [
        Sample(given[index], index, response, [0.0] * len(response), "", "stop")
        for index, response in DRAWN
    ]


@cache
def shared_expander(folder: str, media: tuple[str, ...], frozen: bool) -> Expander:
    """Loading a processor and counting the work of a tower take as long as a step."""
    expand = Expander(ModelSection(pretrain=folder, freeze_vision_tower=frozen), media)
    expand.check_family()
    return expand


def learned(
    folder: str, media: tuple[str, ...], model: dict, layout: dict, splits: list[dict]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return log-probs by row before an update, and all parameters after it.

    There is one result for each split into micro-batches.
    """
    results = []
    for limits in splits:
        strategy = get_strategy({"fsdp": True, "max_norm": 0.0, **layout})
        strategy.setup_distributed()
        section = ModelSection(pretrain=folder, **model)
        with strategy.init_model_context():
            actor = Actor(freeze_parameters(load_model(section), section))
        optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=1.0)
        policy = Policy(
            strategy,
            *strategy.prepare(
                (actor, optimizer, strategy.create_scheduler(optimizer, "constant", 0, 8))
            ),
        )
        data = strategy.mesh.data
        expand = shared_expander(folder, media, section.freeze_vision_tower)
        actor.blank = expand.blank
        first = sum(HELD[data.size][: data.rank])
        mine = samples(expand)[first : first + HELD[data.size][data.rank]]
        for prompt in (sample.prompt for sample in mine):
            assert expand.measure(prompt) == len(expand(prompt).token_ids) - len(prompt.token_ids)

        batch, (rows,) = redistribute(
            strategy.sample_store(), flatten_for_run(mine, first_row=first, expand=expand), **limits
        )
        said = policy.logprobs(batch, rows).split(batch.lengths.tolist())
        by_row = dict(
            pair
            for share in data.gather(list(zip(batch.rows.tolist(), said, strict=True)))
            for pair in share
        )
        policy.learn([LossTerm(batch, rows, sft, policy.denominator(batch, rows))], Metrics())
        results.append(
            (torch.cat([by_row[row] for row in sorted(by_row)]), dict(strategy.full_params(actor)))
        )

    return results


@cache
def plain(
    folder: str, media: tuple[str, ...]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Compute log-probs with transformers, each sample alone.

    Also return the parameters after the update and before it.
    """
    model = transformers_model(folder)
    expand = shared_expander(folder, media, False)

    rows = []
    answers = []
    for sample in samples(expand):
        read = expand(sample.prompt)
        ids = torch.tensor([read.token_ids + sample.token_ids])
        inputs = dict(read.features)
        if VIDEOS in media:
            config = model.config
            inputs["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (
                ids == config.video_token_id
            ).int()

        logprobs = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
            .logits[0, :-1]
            .log_softmax(-1)
        )
        answer = logprobs.gather(1, ids[0, 1:, None])[:, 0][len(read.token_ids) - 1 :]
        rows.append(torch.cat([torch.zeros(len(read.token_ids)), answer]))
        answers.append(answer)

    (-torch.cat(answers).mean()).backward()
    after = {
        name: (p if p.grad is None else p - p.grad).detach() for name, p in model.named_parameters()
    }
    return torch.cat(rows).detach(), after, dict(model.named_parameters())


def check(folder: str, media: tuple[str, ...], tower: str, model: dict, by_rank: list) -> None:
    expected, parameters, before = plain(folder, media)
    for results in by_rank:
        for logprobs, found in results:
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
            assert found.keys() == parameters.keys()
            for name, value in found.items():
                frozen = name in CONSTANT or (
                    not model and any(prefix in name for prefix in (tower, "projector"))
                )
                wanted = before[name] if frozen else parameters[name]
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5, msg=name)

            changed = [
                name
                for name, value in found.items()
                if tower in name and not torch.equal(value, before[name])
            ]
            assert bool(changed) == bool(model), "the tower is trained if it is to be"


Case = tuple[dict, dict, list[dict]]
"""Flags of the model, and of the layout, and the splits into micro-batches."""
CASES: dict[int, dict[str, Case]] = {
    1: {"fsdp": (TRAINED, {}, [PACKED, APART])},
    2: {
        "fsdp": (TRAINED, {}, [PACKED, APART]),
        "frozen": ({}, {}, [APART]),
        "ulysses": (TRAINED, {"sp_size": 2}, [PACKED, APART]),
        "zigzag": (TRAINED, {"sp_size": 2, "sp_impl": "zigzag"}, [PACKED]),
        "tp": (TRAINED, {"tp_size": 2}, [APART]),
        "tp_sequence_parallel": (TRAINED, {"tp_size": 2, "tp_sequence_parallel": True}, [PACKED]),
        "zero3": (TRAINED, {"fsdp": False, "zero_stage": 3}, [APART]),
    },
    4: {"hsdp": (TRAINED, {"dp_replicate": 2}, [APART])},
}
OF_FAMILIES = {
    "qwen3_vl": [*CASES[2]],
    "qwen2_5_vl": ["fsdp", "tp_sequence_parallel"],
    "qwen3_5": ["fsdp", "ulysses"],
    "omni": ["fsdp", "frozen", "tp_sequence_parallel"],
}
"""Cases of each family on two ranks. Qwen3-VL, whose tower also feeds later layers of the decoder,
has all of them, and the others those that meet code of their own: Qwen2.5-VL its times of videos,
which each split passes on alike, Qwen3.5 its layers with a state, and Omni the class of its
thinker.
"""


@pytest.mark.parametrize("world_size", CASES)
def test_gradients_of_sound_are_those_of_transformers(tmp_path, world_size):
    """One of two ranks holds a sample without sound.

    With a sequence in each micro-batch, many micro-batches have none.
    """
    folder = hearing_model(tmp_path, 2)
    cases = CASES[world_size]
    found = run_cases(
        world_size, learned, {name: (folder, (AUDIOS,), *case) for name, case in cases.items()}
    )
    for name, (model, *_) in cases.items():
        check(folder, (AUDIOS,), "audio_tower", model, found[name])


def compare_families(folder: str) -> None:
    both = (IMAGES, VIDEOS)
    read = {
        family: (seeing_qwen(f"{folder}/{family}", family), both, "visual")
        for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
    }
    read["omni"] = omni(f"{folder}/omni", 2), (AUDIOS,), "audio_tower"

    cases = {
        (family, name): (*read[family][:2], *CASES[2][name])
        for family, names in OF_FAMILIES.items()
        for name in names
    }
    for (family, name), by_rank in run_cases(2, learned, cases).items():
        check(*read[family], CASES[2][name][0], by_rank)


def test_gradients_of_families_that_need_torchvision_are_those_of_transformers(tmp_path):
    """Of videos with images beside them, and of sound by a thinker.

    That environment has torchvision.
    """
    in_sglang_environment(compare_families, str(tmp_path))


def test_towers_are_weighed_as_they_compute(tmp_path):
    """The weight is the matrix products of the tower for two clips, in products of a decoder's
    token.

    The products of attention are left out in both.
    """
    expand = Expander(
        ModelSection(pretrain=hearing_model(tmp_path, 2), freeze_vision_tower=False), (AUDIOS,)
    )
    total = {}
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path, attn_implementation="eager")
    read = expand(prompts(expand)[2])
    ids = torch.tensor([read.token_ids])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **read.features)

    for name in ("audio_tower", "language_model"):
        counts = counter.get_flop_counts()[f"Qwen2AudioForConditionalGeneration.model.{name}"]
        total[name] = sum(
            count for product, count in counts.items() if product != torch.ops.aten.bmm
        )

    assert read.tower_tokens == pytest.approx(
        total["audio_tower"] / total["language_model"] * len(read.token_ids), rel=0.1
    )
    expand.__dict__.pop("_tower_work")
    expand.frozen_towers = True
    assert expand(prompts(expand)[2]).tower_tokens == -(-read.tower_tokens // 3)


# -- a whole run

COMMON = [
    "--fsdp",
    "--audios_key=sound",
    "--apply_chat_template",
    "--prompt_max_len=64",
    "--lr_scheduler=constant",
    "--lr_warmup_ratio=0",
    "--max_tokens_per_microbatch=4096",
    "--report_to=jsonl",
]
SFT = [
    "--train_batch_size=64",
    "--actor_learning_rate=2e-3",
    "--num_episodes=20",
    "--stop_loss=0.6",
]
GRPO = [
    "--engine_type=hf",
    "--rollout_batch_size=16",
    "--n_samples_per_prompt=16",
    "--generate_max_len=2",
    "--train_batch_size=256",
    "--limit_mm_audio_per_prompt=2",
    "--num_episodes=99",
    "--max_steps=32",
    "--actor_learning_rate=2e-3",
    "--init_kl_coef=0",
    "--eval_steps=32",
]


def test_a_run_learns_to_understand_digits(tmp_path):
    """From answers first, then by GRPO on two ranks; some rows have two clips, and some none."""
    rng = random.Random(0)
    recordings(tmp_path, "train", 320, rng)
    recordings(tmp_path, "test", 80, rng)

    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for one, other in zip(rows[:8], rows[8:16], strict=True):
        rows.append(
            {
                "input": "<audio>before<audio>?",
                "sound": [one["sound"], other["sound"]],
                "label": one["label"],
            }
        )

    rows += [{"input": f"say {digit}", "label": str(digit)} for digit in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [*COMMON, f"--prompt_data={tmp_path / 'train.jsonl'}"]
    train(
        "train_sft",
        1,
        [*data, f"--pretrain={tiny_qwen2_audio(tmp_path / 'random')}", *SFT],
        tmp_path / "sft",
    )
    start = [f"--pretrain={tmp_path / 'sft' / 'model'}", f"--eval_data={tmp_path / 'test.jsonl'}"]
    found = train("train_ppo", 2, [*data, *start, *GRPO], tmp_path / "grpo")
    rewards = [row["rollout/reward"] for row in found]
    assert (
        sum(rewards[:5]) / 5 < 0.35
        and sum(rewards[-5:]) / 5 > 0.45
        and found[-1]["eval/accuracy"] > 0.45
    )
    assert all(row["engine/logprob_mismatch_max"] < 1e-5 for row in found)
    assert "data:audio/wav;base64," in (tmp_path / "grpo" / "report.html").read_text()


def two_steps_of_a_thinker(folder: Path) -> None:
    recordings(folder, "train", 16, random.Random(0))
    data = (
        (folder / "train.jsonl")
        .read_text()
        .replace("<audio>", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    )
    (folder / "train.jsonl").write_text(data)
    common = [flag for flag in COMMON if flag != "--apply_chat_template"] + [
        f"--prompt_data={folder / 'train.jsonl'}"
    ]

    model = [
        "--no_freeze_vision_tower",
        "--lora_rank=4",
        f"--pretrain={omni(folder / 'released', 2)}",
    ]
    steps = [
        "--advantage_estimator=gae",
        "--engine_type=hf",
        "--rollout_batch_size=8",
        "--n_samples_per_prompt=2",
        "--generate_max_len=3",
        "--train_batch_size=16",
        "--actor_learning_rate=1e-2",
        "--init_kl_coef=1e-3",
    ]
    rows = train("train_ppo", 2, [*common, *model, *steps], folder / "run")
    assert len(rows) == 2 and all(
        row["train/grad_norm"] > 0 and row["engine/logprob_mismatch_max"] < 1e-5 for row in rows
    )

    before, after = (
        Qwen2_5OmniForConditionalGeneration.from_pretrained(folder / name)
        for name in ("released", "run/model")
    )
    changed = {
        name
        for name, tensor in after.state_dict().items()
        if not torch.equal(tensor, before.state_dict()[name])
    }
    assert {name.split(".")[0] for name in changed} == {"thinker"}, (
        "talker and token2wav are those of the released folder"
    )
    assert {".".join(name.split(".")[:3]) for name in changed} >= {
        "thinker.audio_tower.layers",
        "thinker.model.layers",
    }
    read = Expander(ModelSection(pretrain=str(folder / "run/model")), (AUDIOS,))
    assert (
        read.blank[0].token_ids
        == Expander(ModelSection(pretrain=str(folder / "released")), (AUDIOS,)).blank[0].token_ids
    )
    load_scorer(ModelSection(pretrain=str(folder / "run/critic")), new_head=False)
    after.thinker.save_pretrained(folder / "alone")
    alone = load_model(ModelSection(pretrain=str(folder / "alone")))
    export_whole(alone, None, folder / "whole", torch.float32)

    thinker = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        folder / "whole"
    ).state_dict()
    assert all(
        torch.equal(tensor, thinker[name]) for name, tensor in after.thinker.state_dict().items()
    )


def test_a_thinker_is_exported_in_its_whole_folder(tmp_path):
    """The export follows two steps of PPO on two ranks, with adapters in tower and decoder.

    It starts from a thinker alone, without a voice.
    """
    in_sglang_environment(two_steps_of_a_thinker, tmp_path)


def learn_where_a_dot_moves(folder: Path) -> None:
    rng = random.Random(0)
    films(folder, "train", 512, rng)
    films(folder, "test", 32, rng)
    data = [flag.replace("audios_key=sound", "videos_key=film") for flag in COMMON] + [
        f"--prompt_data={folder / 'train.jsonl'}"
    ]
    sft = [
        f"--pretrain={tiny_qwen2_5_vl(folder / 'random')}",
        "--no_freeze_vision_tower",
        *SFT[:-2],
        "--num_episodes=40",
    ]
    train(
        "train_sft",
        1,
        [*data, *sft, "--stop_loss=0.75", "--limit_mm_video_per_prompt=1"],
        folder / "sft",
    )

    start = [
        f"--pretrain={folder / 'sft' / 'model'}",
        f"--eval_data={folder / 'test.jsonl'}",
        "--limit_mm_video_per_prompt=1",
    ]
    grpo = [flag for flag in GRPO if "audio" not in flag and "steps" not in flag] + [
        "--max_steps=26",
        "--eval_steps=26",
    ]
    rows = train("train_ppo", 2, [*data, *start, *grpo], folder / "grpo")
    rewards = [row["rollout/reward"] for row in rows]
    assert (
        sum(rewards[:3]) / 3 < 0.35
        and sum(rewards[-3:]) / 3 > 0.6
        and rows[-1]["eval/accuracy"] > 0.6
    )
    assert all(row["engine/logprob_mismatch_max"] < 1e-5 for row in rows)


def test_a_run_learns_where_a_dot_moves(tmp_path):
    """It learns from answers first, with the tower, and then by GRPO on two ranks."""
    in_sglang_environment(learn_where_a_dot_moves, tmp_path)
