"""Preferences and reward models about images and sound: the gradient of a first step, by plain
transformers on each sequence.
"""

import json
import shutil
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoModelForMultimodalLM, AutoProcessor

from lightrft.config import ModelSection
from lightrft.models.load import Scores, load_scorer
from ranks import run_cases
from runs import rows_of, run_here, train
from seeing import FILMED, hearing_model, picture, seeing_gemma, seeing_model, seeing_qwen
from sglang_environment import in_sglang_environment

pytestmark = pytest.mark.slow

TEXTS = [("What is {}?", 1), ("Nothing.", 0), ("{} or {}", 2), ("x{}", 1)]
"""Of each prompt, with the number of its media."""
WORDS = [("cat", "a dog"), ("no", "yes!"), ("one", "two"), ("bell", "rain")]
DESIRABLE = [True, False, True, True]
OF_POLICIES = ("train_dpo", "train_kto")
FLAGS = [
    "--no_freeze_vision_tower",
    "--max_steps=1",
    "--train_batch_size=4",
    "--prompt_max_len=100",
    "--fsdp",
    "--max_tokens_per_microbatch=160",
    "--beta=0.5",
    "--report_to=jsonl",
]
ROWS: dict[str, Callable[[str, tuple[str, str], bool], dict]] = {
    "train_dpo": lambda text, words, _: {"input": text, "chosen": words[0], "rejected": words[1]},
    "train_rm": lambda text, words, _: {"input": text, "chosen": words[0], "rejected": words[1]},
    "train_kto": lambda text, words, good: {"input": text, "completion": words[0], "label": good},
    "train_prm": lambda text, words, good: {
        "input": text,
        "completions": list(words),
        "labels": [True, good],
    },
}


def given_media(medium: str, items: list) -> dict:
    """What a processor of transformers takes."""
    if medium == "images":
        return {"images": [items]}
    if medium == "audios":
        return {"audio": items, "sampling_rate": 16000}

    metadata = [
        {
            "total_num_frames": len(item),
            "fps": 2.0,
            "frames_indices": [*range(len(item))],
            "duration": len(item) / 2,
        }
        for item in items
    ]
    return {"videos": items, "do_sample_frames": False, "video_metadata": metadata}


class Reference:
    """Plain transformers: its processor reads each prompt with the media."""

    def __init__(self, folder: str, medium: str, mark: str, media: list[list]):
        self.processor = AutoProcessor.from_pretrained(folder)
        self.prompts = []
        for (text, _), items in zip(TEXTS, media, strict=True):
            given = given_media(medium, items) if items else {}
            self.prompts.append(
                dict(
                    self.processor(
                        text=[text.format(*[mark] * len(items))], return_tensors="pt", **given
                    )
                )
            )

    def inputs(self, number: int, answer: list[int]) -> tuple[dict[str, Tensor], int]:
        prompt = self.prompts[number]
        ids = torch.cat([prompt["input_ids"], torch.tensor([answer])], 1)
        inputs = prompt | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in prompt.keys() & {"mm_token_type_ids", "token_type_ids"}:
            inputs[name] = F.pad(prompt[name], (0, len(answer)))
        return inputs, prompt["input_ids"].shape[1]

    def tokens(self, text: str) -> list[int]:
        return [
            *self.processor.tokenizer(text, add_special_tokens=False)["input_ids"],
            self.processor.tokenizer.eos_token_id,
        ]


def logprob(model, reference: Reference, number: int, word: str) -> Tensor:
    answer = reference.tokens(word)
    inputs, start = reference.inputs(number, answer)
    return (
        model(**inputs)
        .logits[0, start - 1 : -1]
        .log_softmax(-1)
        .gather(1, torch.tensor(answer)[:, None])
        .sum()
    )


def scores(model, reference: Reference, number: int, answer: list[int]) -> Tensor:
    inputs, start = reference.inputs(number, answer)
    return model.score(model.model(**inputs).last_hidden_state)[0, start:, 0]


def losses(command: str, model, reference: Reference) -> Tensor:
    """Return the loss of the four rows.

    A policy is also the reference, so the value of the loss is known and only the gradient tells.
    """
    total = torch.zeros(())
    for number, (words, good) in enumerate(zip(WORDS, DESIRABLE, strict=True)):
        if command == "train_dpo":
            first, second = (logprob(model, reference, number, word) for word in words)
            total = (
                total
                - F.logsigmoid(0.5 * ((first - first.detach()) - (second - second.detach()))) / 4
            )
        elif command == "train_kto":
            ratio = logprob(model, reference, number, words[0])
            total = total + torch.sigmoid(-(1 if good else -1) * 0.5 * (ratio - ratio.detach())) / 4
        elif command == "train_rm":
            first, second = (
                scores(model, reference, number, reference.tokens(word))[-1] for word in words
            )
            total = total - F.logsigmoid(first - second) / 4
        else:
            steps = [reference.tokens(word)[:-1] for word in words]
            separator = reference.tokens("\n\n")[:-1]
            answer = [*steps[0], *separator, *steps[1], reference.processor.tokenizer.eos_token_id]
            ends = [len(steps[0]) + len(separator) - 1, len(answer) - 1]
            found = scores(model, reference, number, answer)[ends]
            wanted = torch.tensor([1.0, float(good)])
            total = total + F.binary_cross_entropy_with_logits(found, wanted, reduction="sum") / 8

    return total


@pytest.mark.parametrize(
    ("make", "medium", "mark"),
    [
        (seeing_model, "images", "<image>"),
        (seeing_gemma, "images", "<image>"),
        (partial(hearing_model, seconds=2), "audios", "<|AUDIO|>"),
    ],
    ids=["idefics3", "gemma3", "qwen2_audio"],
)
def test_a_first_step_is_that_of_transformers(tmp_path, make, medium, mark):
    """Two ranks; one row in four is text."""
    compare(tmp_path, make(tmp_path / "model"), medium, mark)


def test_a_first_step_on_videos_is_that_of_transformers(tmp_path):
    """Qwen2.5-VL, whose processor needs torchvision."""
    in_sglang_environment(compare_videos, tmp_path)


def compare_videos(tmp_path: Path) -> None:
    compare(tmp_path, seeing_qwen(tmp_path / "model"), "videos", FILMED)


def compare(tmp_path: Path, folder: str, medium: str, mark: str) -> None:
    key = "medium"
    media, names = written(tmp_path, medium)
    reference = Reference(folder, medium, mark, media)

    scored = scorer(folder, tmp_path / "scorer")
    runs = {}
    for command, row in ROWS.items():
        rows = tmp_path / f"{command}.jsonl"
        with rows.open("w") as file:
            for (text, count), words, good, files in zip(
                TEXTS, WORDS, DESIRABLE, names, strict=True
            ):
                file.write(
                    json.dumps(
                        row(text.format(*[mark] * count), words, good)
                        | ({key: files} if files else {})
                    )
                    + "\n"
                )

        flags = [flag for flag in FLAGS if command in OF_POLICIES or "beta" not in flag]
        flags += [
            f"--prompt_data={rows}",
            f"--{medium}_key={key}",
            f"--save_path={tmp_path / command}",
        ]
        flags += ["--limit_mm_video_per_prompt=2"] * (medium == "videos")
        runs[command] = (
            command,
            [*flags, f"--pretrain={folder if command in OF_POLICIES else scored}"],
        )

    run_cases(2, run_here, runs)
    for command in ROWS:
        policy = command in OF_POLICIES
        (found,) = rows_of(tmp_path / command)
        options = {"dtype": torch.float32, "trust_remote_code": False}
        model = (AutoModelForMultimodalLM if policy else Scores).from_pretrained(
            folder if policy else scored, **options
        )
        loss = losses(command, model, reference)
        loss.backward()

        norm = torch.stack(
            [
                p.grad.norm()
                for name, p in model.named_parameters()
                if p.grad is not None and counted(name)
            ]
        ).norm()
        assert found["train/loss"] == pytest.approx(float(loss), rel=1e-5), command
        assert found["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5), command


def test_a_run_with_a_reward_model_and_a_teacher_that_see(tmp_path):
    """The teacher is the model itself: it sees what the policy sees if it says the same."""
    folder = seeing_model(tmp_path / "model")
    (_, names) = written(tmp_path, "images")
    rows = [
        {"input": text.format(*["<image>"] * count), "picture": files}
        for (text, count), files in zip(TEXTS, names, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        f"--prompt_data={tmp_path / 'rows.jsonl'}",
        "--images_key=picture",
        f"--pretrain={folder}",
        "--engine_type=hf",
        "--fsdp",
        "--prompt_max_len=100",
        f"--teacher_pretrain={folder}",
        "--distill_coef=0.5",
        f"--reward_pretrain={scorer(folder, tmp_path / 'scorer')}",
        "--reward=none",
        "--max_steps=1",
        "--rollout_batch_size=4",
        "--n_samples_per_prompt=2",
        "--train_batch_size=8",
        "--generate_max_len=4",
        "--max_tokens_per_microbatch=160",
        "--report_to=jsonl",
    ]
    (found,) = train("train_ppo", 2, flags, tmp_path / "run")
    assert (
        abs(found["rollout/teacher_kl"]) < 1e-6
        and found["rollout/reward"] != 0
        and found["train/grad_norm"] > 0
    )
    other = seeing_model(tmp_path / "other")
    config = json.loads((Path(other) / "processor_config.json").read_text())
    (Path(other) / "processor_config.json").write_text(json.dumps(config | {"image_seq_len": 9}))

    with pytest.raises(
        RuntimeError, match="its processor reads images otherwise than that of --pretrain"
    ):
        train("train_ppo", 1, [*flags, f"--teacher_pretrain={other}"], tmp_path / "refused")


def counted(name: str) -> bool:
    # a constant, which from_pretrained() makes a parameter
    return "audio_tower.embed_positions" not in name


def written(folder: Path, medium: str) -> tuple[list[list], list[list[str]]]:
    """Write the media of each prompt; return them, and the names of the files."""
    items = []
    names = []
    seed = 0
    for _, count in TEXTS:
        items.append([])
        names.append([])
        for _ in range(count):
            seed += 1
            if medium == "images":
                item = picture(seed)
                name = f"{seed}.png"
                item.save(folder / name)
            elif medium == "videos":
                frames = [picture(10 * seed + number) for number in range(4)]
                name = f"{seed}.webp"
                frames[0].save(
                    folder / name,
                    save_all=True,
                    append_images=frames[1:],
                    duration=500,
                    lossless=True,
                )
                item = np.stack([np.asarray(frame) for frame in frames])
            else:
                samples = (
                    np.random.default_rng(seed).integers(-9000, 9000, 3200 * seed).astype(np.int16)
                )
                name = f"{seed}.wav"
                item = samples.astype(np.float32) / 32768
                with wave.open(str(folder / name), "wb") as file:
                    file.setparams((1, 2, 16000, 0, "NONE", ""))
                    file.writeframes(samples.tobytes())

            items[-1].append(item)
            names[-1].append(name)

    return items, names


def scorer(folder: str, to: Path) -> str:
    """A folder with the same backbone and a head."""
    shutil.copytree(folder, to)
    torch.manual_seed(0)
    model = load_scorer(ModelSection(pretrain=folder))
    torch.testing.assert_close(
        dict(model.model.named_parameters()),
        dict(AutoModel.from_pretrained(folder, dtype=torch.float32).named_parameters()),
    )
    model.save_pretrained(to)
    return str(to)
