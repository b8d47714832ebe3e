"""Images from the data to the gradient: as plain transformers computes it from a padded batch, in every split. And whole runs."""

import io
import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft.algorithms.objectives import sft
from lightrft.config import ModelSection
from lightrft.data.images import IMAGES, ImageFile
from lightrft.data.plane import deal
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.trainable import choose_trained
from lightrft.observe.metrics import Metrics
from lightrft.roles.policy import Policy
from lightrft.rollout.experience import flatten
from lightrft.rollout.media import Expander
from lightrft.strategy import FSDPStrategy
from lightrft.types import Prompt, Sample
from ranks import run_ranks
from runs import train
from scripts.prepare_colours import pictures, tiny_idefics3
from seeing import picture, seeing_model
from tiny import PAD

pytestmark = pytest.mark.slow

TEXTS = [("What is <image>?", [1]), ("No picture.", []), ("<image> or <image>", [2, 1]), ("x", []), ("What is <image>?", [3])]
DRAWN = [(0, [5, 6, 7]), (0, [5, 9]), (1, [8, 9]), (2, [10, 11, 12, 13]), (3, [14]), (2, [10, 11]), (3, [15]), (4, [5, 6, 7])]
"""The prompt of each sample, and its response. Samples of a prompt share what they begin with; the last looks like the first."""
HELD = {1: [8], 2: [7, 1]}
TOKENS = 64
"""Of a micro-batch: none of the samples has more than 22."""


def image(seed: int) -> ImageFile:
    file = io.BytesIO()
    picture(seed, 30 + 10 * seed, 40).save(file, "PNG")
    return ImageFile(f"{seed}.png", file.getvalue())


def samples(processor) -> list[Sample]:
    media = [{IMAGES: [image(seed) for seed in seeds]} if seeds else {} for _, seeds in TEXTS]
    prompts = [Prompt(index, text, processor.tokenizer(text)["input_ids"], multi_modal=media[index])
               for index, (text, _) in enumerate(TEXTS)]  # fmt: skip
    return [Sample(prompts[group], group, response, [0.0] * len(response), "", "stop") for group, response in DRAWN]


def learned(folder: str, settings: dict, micro_batches: list[dict]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """For each split into micro-batches, log-probs by row before an update, and all parameters after it."""
    results = []
    for limits in micro_batches:
        strategy = FSDPStrategy(seed=1, max_norm=0.0, args={"fsdp": True, **settings.get("strategy", {})})
        strategy.setup_distributed()
        section = ModelSection(pretrain=folder, **settings.get("model", {}))
        with strategy.init_model_context():
            actor = Actor(choose_trained(load_model(section), section))
        optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=1.0)
        policy = Policy(strategy, *strategy.prepare((actor, optimizer, strategy.create_scheduler(optimizer, "constant", 0, 8))))
        data, expand = strategy.mesh.data, Expander(section)
        actor.blank = expand.blank
        first = sum(HELD[data.size][: data.rank])
        mine = samples(expand.reader.processor)[first : first + HELD[data.size][data.rank]]
        batch, (rows,) = deal(data, flatten(mine, first_row=first, expand=expand), **{"max_tokens": TOKENS} | limits)
        said = policy.logprobs(batch, rows).split(batch.lengths.tolist())
        by_row = dict(pair for part in data.gather(list(zip(batch.rows.tolist(), said, strict=True))) for pair in part)
        policy.update(batch, rows, sft, policy.denominator(batch, rows, length=1), Metrics())
        results.append((torch.cat([by_row[row] for row in sorted(by_row)]), dict(strategy.full_params(actor))))
    return results


def plain(folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """By transformers, its processor and its padding."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    images = [[file.open() for file in sample.prompt.multi_modal.get(IMAGES, [])] for sample in samples(processor)]
    texts = [TEXTS[group][0] for group, _ in DRAWN]
    inputs = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    prompts = [ids[real.bool()].tolist() for ids, real in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    whole = [prompt + response for prompt, response in zip(prompts, (response for _, response in DRAWN), strict=True)]
    width = max(map(len, whole))
    inputs["input_ids"] = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in whole])
    inputs["attention_mask"] = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in whole])
    logprobs = model(**inputs).logits[:, :-1].log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    answers = [row[len(prompt) - 1 : len(ids) - 1] for row, prompt, ids in zip(logprobs, prompts, whole, strict=True)]
    (-torch.cat(answers).mean()).backward()
    rows = [torch.cat([torch.zeros(len(prompt)), answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    return torch.cat(rows).detach(), {name: (p - p.grad).detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeing_model(tmp_path_factory.mktemp("seeing"))


SPLITS = [{}, {"max_sequences": 1}, {"batching": "dynamic", "max_tokens": 30}]
TRAINED = {"model": {"freeze_vision_tower": False}}


@pytest.mark.parametrize(("world_size", "settings", "splits"), [
    (1, TRAINED, SPLITS[1:]), (2, TRAINED, SPLITS), (2, TRAINED | {"strategy": {"gradient_checkpointing": True}}, SPLITS[:1]),
    (2, {}, SPLITS[:1]),
])  # fmt: skip
def test_gradients_are_those_of_transformers(folder, world_size, settings, splits):
    """Rank 1 of two holds one image; with a sequence in each micro-batch, half of them have no image."""
    expected, parameters = plain(folder)
    before = dict(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).named_parameters())
    for results in run_ranks(world_size, learned, folder, settings, splits):
        for logprobs, found in results:
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
            assert found.keys() == parameters.keys()
            for name, value in found.items():
                frozen = settings == {} and ("vision_model" in name or "connector" in name)
                assert torch.equal(value, before[name]) if frozen else not torch.equal(value, before[name]), name
                torch.testing.assert_close(value, before[name] if frozen else parameters[name], rtol=1e-5, atol=1e-5, msg=name)


# -- whole runs

COMMON = ["--fsdp", "--images_key=images", "--apply_chat_template", "--prompt_max_len=48", "--lr_scheduler=constant",
          "--lr_warmup_ratio=0", "--max_tokens_per_microbatch=2048", "--use_tensorboard=false"]  # fmt: skip
GRPO = ["--rollout_batch_size=16", "--n_samples_per_prompt=16", "--generate_max_len=2", "--train_batch_size=256",
        "--num_episodes=99", "--no_enable_engine_sleep"]  # fmt: skip


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and a model that has begun to learn from answers: a fifth of what it says is right."""
    folder, rng = tmp_path_factory.mktemp("colours"), random.Random(0)
    pictures(folder, "train", 128, rng)
    pictures(folder, "test", 32, rng)
    flags = [*COMMON, f"--pretrain={tiny_idefics3(folder / 'random')}", f"--prompt_data={folder / 'train.jsonl'}"]
    train("train_sft", 1, [*flags, "--train_batch_size=64", "--actor_learning_rate=2e-3", "--num_episodes=20", "--stop_loss=1"],
          folder / "sft")  # fmt: skip
    return folder


def flags_of(colours: Path, data: str) -> list[str]:
    return [*COMMON, *GRPO, f"--pretrain={colours / 'sft' / 'model'}", f"--prompt_data={colours / data}"]


def test_a_run_learns_to_name_colours(colours, tmp_path):
    flags = ["--engine_type=hf", "--max_steps=18", "--actor_learning_rate=2e-3", "--init_kl_coef=0", "--eval_steps=18",
             f"--eval_data={colours / 'test.jsonl'}"]  # fmt: skip
    rows = train("train_ppo", 2, [*flags_of(colours, "train.jsonl"), *flags], tmp_path)
    rewards = [row["rollout/reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-3:]) / 3 > 0.6 and rows[-1]["eval/accuracy"] > 0.9
    assert all(row["engine/logprob_mismatch_max"] < 1e-5 for row in rows)
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["images"][0].startswith("images/train")


def test_an_actor_that_does_not_move(colours, tmp_path):
    """Rows with two images, with one and with none; two passes over two minibatches; images from vLLM."""
    one, other, *rows = [json.loads(line) for line in (colours / "train.jsonl").read_text().splitlines()]
    two = {"input": "Which of <image> and <image>?", "images": one["images"] + other["images"], "label": "r"}
    mixed = [*rows[:4], two, {"input": "colour?", "label": "b"}, two, {"input": "none?", "images": [], "label": "x"}] * 2
    (colours / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    flags = ["--engine_type=vllm", "--engine_kv_cache_gb=0.125", "--actor_learning_rate=0", "--init_kl_coef=0.04",
             "--max_steps=2", "--max_epochs=2", "--train_batch_size=128", "--max_tokens_per_microbatch=100",
             "--no_freeze_vision_tower"]  # fmt: skip
    found = train("train_ppo", 1, [*flags_of(colours, "mixed.jsonl"), *flags], tmp_path)
    assert len(found) == 2
    for row in found:
        assert row["train/ratio"] == 1.0 and row["train/kl"] == 0.0 and row["train/grad_norm"] > 0
        assert row["engine/logprob_mismatch_max"] < 1e-5
