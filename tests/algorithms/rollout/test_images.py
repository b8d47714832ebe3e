"""Images from the data to the gradient: as plain transformers computes it from a padded batch, in
every split. And whole runs.
"""

import io
import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5OmniConfig,
)

from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.algorithms.rollout.experience import flatten_for_run
from lightrft.algorithms.rollout.media_expansion import Expander
from lightrft.config import ConfigError, ModelSection
from lightrft.core.batch import Batch
from lightrft.core.losses import Denominator, token_mean
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt, Sample
from lightrft.data.media_files import IMAGES, ImageFile
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import load_model, load_scorer, load_tokenizer
from lightrft.models.lora import freeze_parameters
from lightrft.rewards.models import ModelRewards, ScoringModel
from lightrft.strategy import get_strategy
from lightrft.strategy.batching.micro_batches import redistribute
from ranks import run_cases, run_ranks
from runs import rows_of, run_here, train
from scripts.prepare_colours import CHAT_TEMPLATE, pictures, tiny_idefics3
from seeing import (
    FRAMED,
    MARKS,
    picture,
    seeing_gemma,
    seeing_internvl,
    seeing_llava,
    seeing_model,
    seeing_qwen,
)
from sglang_environment import in_sglang_environment
from tiny import PAD

pytestmark = pytest.mark.slow

TEXTS = [
    ("What is <image>?", [1]),
    ("No picture.", []),
    ("<image>\n or <image>", [2, 1]),
    ("x", []),
    ("What is <image>?", [3]),
]
DRAWN = [
    (0, [5, 6, 7]),
    (0, [5, 9]),
    (1, [8, 9]),
    (2, [10, 11, 12, 13]),
    (3, [14]),
    (2, [10, 11]),
    (3, [15]),
    (4, [5, 6, 7]),
]
"""The prompt of each sample, and its response. Samples of a prompt share what they begin with; the
last looks like the first."""
HELD = {1: [8], 2: [7, 1], 4: [3, 2, 2, 1]}
TOKENS = 64
"""Of a micro-batch: none of the samples has more than 22."""


def image(seed: int) -> ImageFile:
    file = io.BytesIO()
    picture(seed, 30 + 10 * seed, 40).save(file, "PNG")
    return ImageFile(f"{seed}.png", file.getvalue())


def framed(processor) -> list[tuple[str, list[int]]]:
    """The texts with the model's own placeholders."""
    mark = FRAMED if processor.image_token in FRAMED else "<image>"
    return [(text.replace("<image>", mark), seeds) for text, seeds in TEXTS]


def samples(processor) -> list[Sample]:
    media = [{IMAGES: [image(seed) for seed in seeds]} if seeds else {} for _, seeds in TEXTS]
    prompts = [
        Prompt(index, text, processor.tokenizer(text)["input_ids"], multi_modal=media[index])
        for index, (text, _) in enumerate(framed(processor))
    ]
    return [
        Sample(prompts[group], group, response, [0.0] * len(response), "", "stop")
        for group, response in DRAWN
    ]


@cache
def shared_expander(folder: str, frozen: bool) -> Expander:
    """Loading a processor and counting the work of a tower take as long as a step."""
    return Expander(ModelSection(pretrain=folder, freeze_vision_tower=frozen))


def learned(
    folder: str, settings: dict, micro_batches: list[dict]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return log-probs by row before an update, and all parameters after it.

    There is one result for each split into micro-batches.
    """
    results = []
    for limits in micro_batches:
        strategy = get_strategy({"fsdp": True, "max_norm": 0.0, **settings.get("strategy", {})})
        strategy.setup_distributed()
        section = ModelSection(pretrain=folder, **settings.get("model", {}))
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
        expand = shared_expander(folder, section.freeze_vision_tower)
        actor.blank = expand.blank
        first = sum(HELD[data.size][: data.rank])
        mine = samples(expand.reader.processor)[first : first + HELD[data.size][data.rank]]
        flat = flatten_for_run(mine, first_row=first, expand=expand)
        batch, (rows,) = redistribute(
            strategy.sample_store(), flat, **{"max_tokens": TOKENS} | limits
        )
        said = policy.logprobs(batch, rows).split(batch.lengths.tolist())
        by_row = dict(
            pair
            for share in data.gather(list(zip(batch.rows.tolist(), said, strict=True)))
            for pair in share
        )
        policy.learn([LossTerm(batch, rows, sft, policy.denominator(batch, rows))], Metrics())
        parameters = strategy.full_params(actor)
        if section.lora_rank:  # those are merged
            parameters = ((name, value.full_tensor()) for name, value in actor.hf_parameters())
        results.append((torch.cat([by_row[row] for row in sorted(by_row)]), dict(parameters)))

    return results


@cache
def plain(folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the same with transformers, the model's processor and padding."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    images = [
        [file.open() for file in sample.prompt.multi_modal.get(IMAGES, [])]
        for sample in samples(processor)
    ]
    texts = [framed(processor)[group][0] for group, _ in DRAWN]
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )
    prompts = [
        ids[real.bool()].tolist()
        for ids, real in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    whole = [
        prompt + response
        for prompt, response in zip(prompts, (response for _, response in DRAWN), strict=True)
    ]
    width = max(map(len, whole))
    inputs["input_ids"] = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in whole])
    for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, width - inputs[name].shape[1]))

    inputs["attention_mask"] = torch.tensor(
        [[1] * len(ids) + [0] * (width - len(ids)) for ids in whole]
    )
    logprobs = (
        model(**inputs)
        .logits[:, :-1]
        .log_softmax(-1)
        .gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    )
    answers = [
        row[len(prompt) - 1 : len(ids) - 1]
        for row, prompt, ids in zip(logprobs, prompts, whole, strict=True)
    ]
    (-torch.cat(answers).mean()).backward()

    rows = [
        torch.cat([torch.zeros(len(prompt)), answer])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return torch.cat(rows).detach(), {
        name: (p if p.grad is None else p - p.grad).detach() for name, p in model.named_parameters()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeing_model(tmp_path_factory.mktemp("seeing"))


SPLITS = [{}, {"max_sequences": 1}, {"batching": "dynamic", "max_tokens": 30}]
TRAINED = {"model": {"freeze_vision_tower": False}}
ADAPTED = {"model": {"freeze_vision_tower": False, "lora_rank": 4, "lora_alpha": 8}}


def strategy(**layout) -> dict:
    return TRAINED | {"strategy": layout}


CASES = {
    1: {"fsdp": (TRAINED, [{"max_tokens": 256}, SPLITS[2]])},
    2: {
        "fsdp": (TRAINED, SPLITS),
        "frozen": ({}, SPLITS[:1]),
        "recomputed": (strategy(gradient_checkpointing=True), SPLITS[:1]),
        "ulysses": (strategy(sp_size=2), SPLITS[:2]),
        "zigzag": (strategy(sp_size=2, sp_impl="zigzag"), SPLITS[:1]),
        "tp": (strategy(tp_size=2), SPLITS[1:2]),
        "tp_sequence_parallel": (strategy(tp_size=2, tp_sequence_parallel=True), SPLITS[:1]),
        **{
            f"zero{stage}": (strategy(fsdp=False, zero_stage=stage), SPLITS[1:2])
            for stage in (2, 3)
        },
        "lora": (ADAPTED, SPLITS[1:2]),
        "lora_ulysses": (ADAPTED | {"strategy": {"sp_size": 2}}, SPLITS[1:2]),
        "gemma3 fsdp": (TRAINED, SPLITS[:2]),
        "gemma3 frozen": ({}, SPLITS[2:]),
        "gemma3 recomputed": (
            strategy(gradient_checkpointing=True, gradient_checkpointing_policy="selective"),
            SPLITS[:1],
        ),
        "gemma3 ulysses": (strategy(sp_size=2), SPLITS[:1]),
        "gemma3 zigzag": (strategy(sp_size=2, sp_impl="zigzag"), SPLITS[:1]),
        "gemma3 tp": (strategy(tp_size=2), SPLITS[:1]),
        # its tower reads a layer before the last one: parameters behind it have no gradient
        "llava fsdp": (TRAINED, SPLITS[:1]),
        "llava tp": (strategy(tp_size=2), SPLITS[:1]),
    },
    4: {
        "hsdp": (strategy(dp_replicate=2), SPLITS[1:2]),
        "tp": (strategy(tp_size=2), SPLITS[:1]),
        "tp_cp": (strategy(tp_size=2, cp_size=2, tp_sequence_parallel=True), SPLITS[:1]),
        "gemma3 hsdp": (strategy(dp_replicate=2), SPLITS[:1]),
        "gemma3 tp_cp": (
            strategy(tp_size=2, cp_size=2, sp_impl="zigzag", tp_sequence_parallel=True),
            SPLITS[:1],
        ),
    },
}


@pytest.fixture(scope="module")
def folder_of(folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The model of a case."""
    others = {
        "gemma3": seeing_gemma(tmp_path_factory.mktemp("gemma3")),
        "llava": seeing_llava(tmp_path_factory.mktemp("llava")),
    }
    return lambda case: others.get(case.split()[0], folder)


@pytest.fixture(scope="module")
def results(folder_of) -> Callable[[int], dict[str, list]]:
    """Results of all cases of as many ranks, by case and rank, in one start."""

    @cache
    def of(world_size: int) -> dict[str, list]:
        return run_cases(
            world_size,
            learned,
            {name: (folder_of(name), *case) for name, case in CASES[world_size].items()},
        )

    return of


@pytest.mark.parametrize(
    ("world_size", "case"), [(size, case) for size, cases in CASES.items() for case in cases]
)
def test_gradients_are_those_of_transformers(folder_of, results, world_size, case):
    """Rank 1 of two holds one image.

    With a sequence in each micro-batch, half of the micro-batches have no image.
    """
    settings = CASES[world_size][case][0]
    by_rank = results(world_size)[case]
    folder = folder_of(case)
    check_adapters(folder, by_rank) if "lora" in case else check(folder, settings, by_rank)


def check(
    folder: str, settings: dict, by_rank: list[list[tuple[Tensor, dict[str, Tensor]]]]
) -> None:
    expected, parameters = plain(folder)
    before = dict(
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    for results in by_rank:
        for logprobs, found in results:
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
            assert found.keys() == parameters.keys()
            for name, value in found.items():
                frozen = settings == {} and any(
                    prefix in name for prefix in ("vision_", "connector", "visual", "projector")
                )
                assert (
                    torch.equal(value, before[name])
                    if frozen
                    else not (
                        torch.equal(value, before[name])
                        and not torch.equal(parameters[name], before[name])
                    )
                ), name
                torch.testing.assert_close(
                    value,
                    before[name] if frozen else parameters[name],
                    rtol=1e-5,
                    atol=1e-5,
                    msg=name,
                )


def compare_in_rows_and_columns(folder: str) -> None:
    split = {
        "fsdp": (TRAINED, [{"max_tokens": 40}]),
        "tp": (strategy(tp_size=2, tp_sequence_parallel=True), SPLITS[:1]),
    }
    made = {
        family: seeing_qwen(f"{folder}/{family}", family)
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
    }
    cases = {
        (family, name): (made[family], *case) for family in made for name, case in split.items()
    }
    for hybrid in ("qwen3_5", "qwen3_5_moe"):
        del cases[hybrid, "tp"]  # layers with a state are not split
    made |= {
        "internvl": seeing_internvl(f"{folder}/internvl"),
        "smolvlm": seeing_model(f"{folder}/smolvlm", family="smolvlm"),
    }

    for family, limits in (("internvl", {"max_tokens": 256}), ("smolvlm", {})):
        cases[family, "fsdp"] = (made[family], TRAINED, [limits])
        cases[family, "tp"] = (made[family], strategy(tp_size=2), [limits])

    for case, by_rank in run_cases(2, learned, cases).items():
        check(made[case[0]], cases[case][1], by_rank)
    for counted in (
        *(made[family] for family in made if family != "smolvlm"),
        splitting_model(f"{folder}/idefics3"),
    ):
        compare_counts(counted)


def test_gradients_with_positions_in_space(tmp_path):
    """M-RoPE, InternVL and SmolVLM have processors that need torchvision.

    With torchvision idefics3 also makes images in another way.
    """
    in_sglang_environment(compare_in_rows_and_columns, str(tmp_path))


def check_adapters(folder: str, by_rank: list[list[tuple[Tensor, dict[str, Tensor]]]]) -> None:
    """Check an update of every linear layer except the head.

    With B = 0 the gradient of B is the gradient of the whole matrix times A.
    """
    expected, after = plain(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    before = dict(model.named_parameters())
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for ((logprobs, found),) in by_rank:
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        layers = [
            name.removesuffix(".lora_B.default.weight") for name in found if ".lora_B" in name
        ]
        assert {*layers} == linear - {"lm_head"}

        for layer in layers:
            update = (after[f"{layer}.weight"] - before[f"{layer}.weight"]) @ found[
                f"{layer}.lora_A.default.weight"
            ].T
            torch.testing.assert_close(
                found[f"{layer}.lora_B.default.weight"], 2 * update, rtol=1e-5, atol=1e-5, msg=layer
            )
            assert torch.equal(found[f"{layer}.base_layer.weight"], before[f"{layer}.weight"])


def squares(values: Tensor, batch: Batch, denominator: Denominator) -> tuple[Tensor, dict]:
    """Half of the squared distance from 1, mean over the learned tokens."""
    return token_mean(0.5 * (values - 1) ** 2, batch, denominator), {}


def valued(folder: str, saved: str, layout: dict) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return values by row, and the parameters after a step, of a critic that starts from `folder`.

    The critic is saved. Each row is a micro-batch.
    """
    strategy = get_strategy({"fsdp": True, "max_norm": 0.0, **layout})
    strategy.setup_distributed()
    with strategy.init_model_context():
        scorer = Scorer(load_scorer(ModelSection(pretrain=folder)))
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
    prepared = strategy.prepare(
        (scorer, optimizer, strategy.create_scheduler(optimizer, "constant", 0, 8))
    )
    critic = Critic(strategy, *prepared, max_tokens=TOKENS)
    data = strategy.mesh.data
    expand = Expander(ModelSection(pretrain=folder))
    critic.module.blank = expand.blank
    strategy.save_model(critic.module, load_tokenizer(ModelSection(pretrain=folder)), Path(saved))
    first = sum(HELD[data.size][: data.rank])
    mine = samples(expand.reader.processor)[first : first + HELD[data.size][data.rank]]
    flat = flatten_for_run(mine, first_row=first, expand=expand)
    batch, (rows,) = redistribute(strategy.sample_store(), flat, max_tokens=TOKENS, max_sequences=1)
    values = critic.values(batch, rows).split(batch.lengths.tolist())
    by_row = dict(
        pair
        for share in data.gather(list(zip(batch.rows.tolist(), values, strict=True)))
        for pair in share
    )
    critic.learn([LossTerm(batch, rows, squares, critic.denominator(batch, rows))], Metrics())

    return [by_row[row] for row in sorted(by_row)], dict(strategy.full_params(critic.module))


def test_a_critic_sees(folder, tmp_path):
    """The head sits on the backbone of transformers, also after the critic was saved and loaded.

    Both learn.
    """
    layouts = {"fsdp": {}, "ulysses": {"sp_size": 2}, "tp": {"tp_size": 2}}
    saved = {name: str(tmp_path / name) for name in layouts}
    cases = {name: (folder, saved[name], layout) for name, layout in layouts.items()}
    for name, ((found, after), _) in run_cases(2, valued, cases).items():
        check_critic(folder, saved[name], found, after)


def check_critic(folder: str, saved: str, found: list[Tensor], after: dict[str, Tensor]) -> None:
    expand = Expander(ModelSection(pretrain=folder))
    answers = []

    scored = load_scorer(ModelSection(pretrain=saved), new_head=False)
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for sample, values in zip(samples(expand.reader.processor), found, strict=True):
        read = expand(sample.prompt)
        ids = torch.tensor([read.token_ids + sample.token_ids])
        hidden = backbone(
            input_ids=ids, attention_mask=torch.ones_like(ids), **read.features
        ).last_hidden_state[0]
        expected = torch.cat([torch.zeros(1), scored.score(hidden)[:-1, 0]])
        torch.testing.assert_close(values, expected.detach(), rtol=0, atol=1e-5)
        answers.append(expected[len(read.token_ids) :])

    (0.5 * (torch.cat(answers) - 1) ** 2).mean().backward()
    learned = {
        **{f"model.{name}": p for name, p in backbone.named_parameters()},
        "score.weight": scored.score.weight,
    }
    assert after.keys() == learned.keys()

    for name, parameter in learned.items():
        torch.testing.assert_close(
            after[name], (parameter - 0.1 * parameter.grad).detach(), rtol=1e-5, atol=1e-5, msg=name
        )
        assert parameter.grad.any(), name


def rewarded(folder: str, saved: str) -> list[float]:
    """Rewards of this rank's samples by a reward model; rank 1 has one of them."""
    strategy = get_strategy({"fsdp": True})
    strategy.setup_distributed()
    section = ModelSection(pretrain=folder)
    data = strategy.mesh.data

    with strategy.init_model_context():
        scorer = Scorer(load_scorer(ModelSection(pretrain=saved), new_head=False)).requires_grad_(
            False
        )

    role = RewardModel(strategy, strategy.prepare(scorer), max_tokens=TOKENS)
    expand = Expander(section)
    role.module.blank = expand.blank
    first = sum(HELD[data.size][: data.rank])
    mine = samples(expand.reader.processor)[first : first + HELD[data.size][data.rank]]
    ModelRewards([ScoringModel("seeing", role, 2.0)], expand=expand)(mine)

    return [sample.reward for sample in mine]


def test_a_reward_model_sees(folder, tmp_path):
    """The reward is the score at the last token of each sequence, times the weight of the model.

    The backbone of transformers computes the expected score.
    """
    torch.manual_seed(0)
    scored = load_scorer(ModelSection(pretrain=folder))
    scored.save_pretrained(tmp_path)
    found = sum(run_ranks(2, rewarded, folder, str(tmp_path)), [])

    expand = Expander(ModelSection(pretrain=folder))
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for sample, reward in zip(samples(expand.reader.processor), found, strict=True):
        read = expand(sample.prompt)
        ids = torch.tensor([read.token_ids + sample.token_ids])
        with torch.no_grad():
            hidden = backbone(
                input_ids=ids, attention_mask=torch.ones_like(ids), **read.features
            ).last_hidden_state[0, -1]
            assert reward == pytest.approx(2 * float(scored.score(hidden)), abs=1e-5)


# -- how many tokens an image has


def splitting_model(folder: str, *, marked: bool = True) -> str:
    """Write a model that cuts images into up to four by four tiles.

    It has a token for each position of a tile; unless `marked`, it has several.
    """
    processor = AutoProcessor.from_pretrained(seeing_model(folder))
    if marked:
        tokens = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
        processor.tokenizer.add_special_tokens({"extra_special_tokens": [*MARKS.values(), *tokens]})
    processor.image_processor.do_image_splitting = True
    processor.image_processor.size = {"longest_edge": 224}
    processor.save_pretrained(folder)
    return folder


def compare_counts(folder: str) -> None:
    """Compare what the processor says and what it makes for 60 sizes.

    Both are numbers of tokens, or the reason why there are none.
    """
    expand = Expander(ModelSection(pretrain=folder))
    rng = random.Random(0)
    sizes = [(round(2 ** rng.uniform(0, 10)), round(2 ** rng.uniform(0, 10))) for _ in range(60)]
    counted = [outcome(expand._counted, size) for size in sizes]
    assert counted == [outcome(partial(expand._expanded_length, IMAGES), size) for size in sizes]
    assert expand._frame == 0 and len(set(counted)) > 6


def outcome(tokens: Callable[[tuple[int, int]], int], size: tuple[int, int]) -> int | str:
    try:
        return tokens(size)
    except ValueError as error:
        return str(error)


def test_tokens_are_counted_as_they_are_made(folder_of, tmp_path):
    """A processor that miscounts is not believed: the tokenizer reads the positions of tiles as
    letters.

    The processor of Gemma 3 leaves out four tokens around an image, because it joins the line
    breaks there with the line breaks of the text.
    """
    compare_counts(splitting_model(str(tmp_path / "counts")))
    expand = Expander(
        ModelSection(pretrain=splitting_model(str(tmp_path / "miscounts"), marked=False))
    )
    prompt = Prompt(
        0, "", [expand.reader.processor.image_token_id], multi_modal={IMAGES: [image(1)]}
    )
    assert (
        expand.measure(prompt) == len(expand(prompt).token_ids) - 1 != expand._counted((40, 40)) - 1
    )

    expand = Expander(ModelSection(pretrain=folder_of("gemma3")))
    for text, added in (
        ("a<image>b", 7),
        ("a\n<image>\n\nb", 5),
        ("<image>\n<image>\n", 12),
        ("<image><image>", 13),
    ):
        ids = expand.reader.processor.tokenizer(text)["input_ids"]
        seen = {IMAGES: [image(1)] * text.count("<image>")}
        prompt = Prompt(0, text, ids, multi_modal=seen)
        assert (
            expand._frame == 4
            and expand.measure(prompt) == len(expand(prompt).token_ids) - len(ids) == added
        )


@pytest.mark.parametrize(
    ("config", "medium", "reason"),
    [
        (
            Qwen2_5OmniConfig(),
            "images",
            "qwen2_5_omni_thinker cannot be trained on images: positions of its images depend on",
        ),
        (
            CONFIG_MAPPING["qwen2_vl"](),
            "videos",
            "qwen2_vl cannot be trained on videos: its gradients were not compared",
        ),
    ],
    ids=["qwen2_5_omni", "qwen2_vl"],
)
def test_other_families_are_refused_with_the_reason(tmp_path, config, medium, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        Expander(ModelSection(pretrain=str(tmp_path)), (medium,)).check_family()


def test_prompts_that_were_prepared_are_not_expanded_again(folder):
    """Until the next ones are prepared; another prompt with the same index is another one."""
    expand = Expander(ModelSection(pretrain=folder))
    token = expand.reader.processor.image_token_id
    first, other = (
        Prompt(0, "", [token, 65], multi_modal={IMAGES: [image(seed)]}) for seed in (1, 2)
    )
    expand.prepare([first])
    assert expand(first) is expand(first) and not torch.equal(
        *(expand(each).features["pixel_values"] for each in (first, other))
    )
    prepared = expand(first)
    expand.prepare([other])
    assert expand(first) is not prepared
    assert torch.equal(expand(first).features["pixel_values"], prepared.features["pixel_values"])


# -- a whole run

COMMON = [
    "--fsdp",
    "--images_key=images",
    "--apply_chat_template",
    "--prompt_max_len=48",
    "--lr_scheduler=constant",
    "--lr_warmup_ratio=0",
    "--max_tokens_per_microbatch=2048",
    "--report_to=jsonl",
]
SFT = ["--train_batch_size=64", "--actor_learning_rate=2e-3", "--num_episodes=20", "--stop_loss=1"]
GRPO = [
    "--rollout_batch_size=16",
    "--n_samples_per_prompt=16",
    "--generate_max_len=2",
    "--train_batch_size=256",
    "--num_episodes=99",
    "--max_steps=16",
    "--actor_learning_rate=2e-3",
    "--init_kl_coef=1e-4",
    "--eval_steps=16",
    "--engine_type=vllm",
    "--num_trajectories_to_save=256",
]

GAE = [
    "--advantage_estimator=gae",
    "--engine_type=hf",
    "--rollout_batch_size=32",
    "--n_samples_per_prompt=4",
    "--generate_max_len=2",
    "--train_batch_size=128",
    "--num_episodes=99",
    "--max_steps=16",
    "--eval_steps=16",
    "--actor_learning_rate=2e-3",
    "--critic_learning_rate=2e-3",
    "--no_enable_engine_sleep",
]
ONE_STEP = [
    "--engine_type=hf",
    "--rollout_batch_size=8",
    "--n_samples_per_prompt=4",
    "--generate_max_len=2",
    "--train_batch_size=32",
    "--max_steps=1",
    "--no_enable_engine_sleep",
]


def mixed(folder: Path) -> None:
    """Pictures of one colour; some rows to learn from have two of them, and some have none."""
    rng = random.Random(0)
    pictures(folder, "train", 112, rng)
    pictures(folder, "test", 32, rng)

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for one, other in zip(rows[:8], rows[8:16], strict=True):
        rows.append(
            {
                "input": "<image>before<image>?",
                "images": one["images"] + other["images"],
                "label": one["label"],
            }
        )

    rows += [{"input": f"say {letter}", "label": letter} for letter in "rgbykwmc"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_learns_to_name_colours(tmp_path):
    """The model learns from answers first, until a fifth of what it says is right.

    Then it learns by GRPO, by PPO with a critic that sees, and one step by each of the estimators
    for which a model reads the pictures once more. In its first step it is its own reference.
    """
    mixed(tmp_path)
    data = [*COMMON, f"--prompt_data={tmp_path / 'train.jsonl'}"]
    train(
        "train_sft",
        1,
        [*data, f"--pretrain={tiny_idefics3(tmp_path / 'random')}", *SFT],
        tmp_path / "sft",
    )
    start = [f"--pretrain={tmp_path / 'sft' / 'model'}", f"--eval_data={tmp_path / 'test.jsonl'}"]
    first, *rows = train("train_ppo", 1, [*data, *start, *GRPO], tmp_path / "grpo")
    assert first["train/ratio"] == 1.0 and first["train/kl"] == 0.0 and first["train/grad_norm"] > 0
    rewards = [row["rollout/reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.6 and rows[-1]["eval/accuracy"] > 0.9
    assert all(row["engine/logprob_mismatch_max"] < 1e-5 for row in (first, *rows))

    samples = [
        json.loads(line) for line in (tmp_path / "grpo" / "samples.jsonl").read_text().splitlines()
    ]
    assert {len(sample.get("images", [])) for sample in samples} == {0, 1, 2}
    found = train("train_ppo", 2, [*data, *start, *GAE], tmp_path / "gae")
    rewards = [row["rollout/reward"] for row in found]
    assert (
        sum(rewards[:4]) / 4 < 0.3
        and sum(rewards[-4:]) / 4 > 0.4
        and found[-1]["eval/accuracy"] > 0.6
    )

    assert (
        found[0]["critic/explained_variance"]
        < 0
        < min(row["critic/explained_variance"] for row in found[-4:])
    )
    assert all(row["engine/logprob_mismatch_max"] < 1e-5 for row in found)
    flags = [*data, start[0], *ONE_STEP]
    steps = {name: (name, flags, tmp_path) for name in ("remax", "gkd")}
    for name, ((row,),) in run_cases(1, one_step, steps).items():
        assert row["train/grad_norm"] > 0 and row["train/ratio"] == 1.0, name


def test_a_run_goes_on_without_pictures_that_are_cut_off(tmp_path):
    """Two of ten pictures are cut off, and were not read before.

    The run has two steps with eight prompts each on two ranks.
    """
    pictures(tmp_path, "train", 10, random.Random(0))
    for file in sorted((tmp_path / "images").iterdir())[:2]:
        file.write_bytes(file.read_bytes()[:-30])
    flags = [
        "--check_media=none",
        "--bad_rows=skip",
        f"--pretrain={tiny_idefics3(tmp_path / 'model')}",
        "--max_steps=2",
        f"--prompt_data={tmp_path / 'train.jsonl'}",
        *(flag for flag in ONE_STEP if "max_steps" not in flag),
    ]
    rows = train("train_ppo", 2, [*COMMON, *flags, "--num_episodes=2"], tmp_path / "run")
    assert len(rows) == 2 and rows[-1]["rollout/prompts_left_out"] == 2


def test_runs_of_gemma_on_two_ranks(tmp_path):
    """The model learns from answers, and then by GRPO.

    The engine sees what the trainer sees: each token of an image attends to the whole image.
    """
    mixed(tmp_path)
    folder = Path(seeing_gemma(tmp_path / "random"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    data = [*COMMON, f"--prompt_data={tmp_path / 'train.jsonl'}", "--no_freeze_vision_tower"]
    rows = train(
        "train_sft", 2, [*data, f"--pretrain={folder}", *SFT, "--max_steps=6"], tmp_path / "sft"
    )
    assert rows[-1]["train/loss"] < 0.9 * rows[0]["train/loss"] and all(
        row["train/grad_norm"] > 0 for row in rows
    )

    (row,) = train(
        "train_ppo",
        2,
        [*data, f"--pretrain={tmp_path / 'sft' / 'model'}", *ONE_STEP],
        tmp_path / "grpo",
    )
    assert row["train/ratio"] == 1.0 and row["engine/logprob_mismatch_max"] < 1e-5


def one_step(estimator: str, flags: list[str], folder: Path) -> list[dict]:
    """Metrics of a step with this advantage estimator."""
    teacher = [f"--teacher_pretrain={folder / 'random'}"]
    added = teacher if estimator != "remax" else []
    run_here(
        "train_ppo",
        [
            *flags,
            *added,
            f"--advantage_estimator={estimator}",
            f"--save_path={folder / 'steps' / estimator}",
        ],
    )

    return rows_of(folder / "steps" / estimator)
