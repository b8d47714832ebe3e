"""Prompts with images, videos and sound, by the same model in plain transformers: hf alone, vLLM
and SGLang on two ranks, apart and as one.
"""

import traceback
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    Gemma3Config,
    Idefics3Config,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen3Config,
)
from transformers.video_utils import VideoMetadata

from engine.contract import Bench, flipped_elements_are_named
from lightrft.config import ConfigError, EngineSection, ModelSection
from lightrft.core.batch import concatenated_features
from lightrft.core.samples import Completion
from lightrft.engine.base import Request, Sampling
from lightrft.engine.hf import has_positions_in_space
from lightrft.engine.media import MEDIA_NAMES, Clip, Video, digest, read
from lightrft.engine.model_info import Vocabulary, media_limits, placeholder_token_ids
from lightrft.engine.probe import Probe
from lightrft.engine.testing import perturbed, start_engine
from lightrft.models.load import load_model
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy import EngineStatus, FSDPStrategy
from lightrft.strategy.prompt_reader import PromptReader, as_list, per_prompt
from ranks import run_ranks
from seeing import (
    FILMED,
    FRAMED,
    IMAGE,
    clip,
    film,
    hearing_model,
    omni,
    picture,
    seeing_gemma,
    seeing_internvl,
    seeing_llava,
    seeing_model,
    seeing_qwen,
    transformers_model,
)
from sglang_environment import beside_torchvision, in_sglang_environment
from tiny import tiny_model
from with_vllm import load_vllm

GREEDY = Sampling(temperature=0, max_tokens=10)
ALONE = Axis("engine", 1, 0, None)
FIRST = picture(1)
CLEAR = picture(4)
CLEAR.putalpha(picture(5).convert("L"))
HEARD = clip(1)
FILM = [picture(seed) for seed in range(4)]
SEEN: dict[str, list[tuple[str, list]]] = {
    "images": [
        ("What is <image>?", [FIRST]),
        ("No picture.", []),
        ("<image>\n or <image>?", [picture(2, 30, 60), FIRST]),
        ("What is <image>?", [FIRST]),
        ("x", []),
        ("<image>", [CLEAR]),
        ("What is <image>?", [picture(3, 90, 20)]),
    ],
    "audios": [
        ("What is <|AUDIO|>?", [HEARD]),
        ("No sound.", []),
        ("<|AUDIO|> or <|AUDIO|>", [clip(2, 0.3), HEARD]),
        ("What is <|AUDIO|>?", [HEARD]),
        ("x", []),
        ("<|AUDIO|>", [clip(4, 0.1)]),
        ("What is <|AUDIO|>?", [clip(3, 0.5)]),
    ],
    "videos": [
        ("What is <video>?", [FILM]),
        ("No film.", []),
        ("<video> or <video>", [film(2, 2, 30, 60), FILM]),
        ("What is <video>?", [FILM]),
        ("x", []),
        ("<video>", [Video(film(4, 3), fps=8)]),
        ("What is <video>?", [film(3, 2, 90, 20)]),
    ],
}
"""Prompts of a model, by what it reads beside text: the first and the fourth are the same, the
second and the fifth are text."""
IN_TEXT = {"images": "<image>", "videos": "<video>", "audios": "<|AUDIO|>"}
DIFFERENT = {"images": picture, "videos": film, "audios": clip}
Prompt = tuple[str, list | dict[str, list]]
"""Text, and what its model reads beside it, or that by medium where there are several."""


class Reference:
    """Plain transformers: the processor reads text and media, and the model gets the result.

    `name` is the kind of media in the prompts.
    """

    def __init__(self, folder: str, name: str, atol: float = 1e-5):
        self.atol = atol
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = transformers_model(folder).eval()
        self.name = name
        self.placeholders = list(placeholder_token_ids(self.model.config))
        self.answers: dict[tuple, list[int]] = {}

    def framed(self, text: str) -> str:
        framed = getattr(self.processor, "image_token", "<image>") in FRAMED
        return text.replace("<image>", FRAMED).replace("<video>", FILMED) if framed else text

    def media(self, items: list | dict[str, list]) -> dict[str, list]:
        return items if isinstance(items, dict) else {self.name: items} if items else {}

    def inputs(self, text: str, items: list | dict[str, list]) -> dict[str, torch.Tensor]:
        given: dict[str, Any] = {}
        for name, files in self.media(items).items():
            if name == "audios":
                given |= {"audio": [clip.waveform for clip in files], "sampling_rate": 16000}
            elif name == "images":
                given |= {"images": [files]}
            else:
                films = list(map(Video.of, files))
                given |= {
                    "videos": [film.frames for film in films],
                    "do_sample_frames": False,
                    "video_metadata": [
                        VideoMetadata(
                            len(film.frames),
                            fps=film.fps,
                            frames_indices=list(range(len(film.frames))),
                        )
                        for film in films
                    ],
                }

        return dict(self.processor(text=[text], return_tensors="pt", **given))

    def request(self, text: str, items: list | dict[str, list]) -> Request:
        return Request(self.processor.tokenizer(text)["input_ids"], self.media(items))

    def greedy(self, prompt: Prompt) -> list[int]:
        known = self.model, prompt[0], *map(id, chain(*self.media(prompt[1]).values()))
        if known not in self.answers:
            inputs = self.inputs(*prompt)
            banned = [[token] for token in self.placeholders]
            tokens = self.model.generate(
                **inputs, max_new_tokens=10, do_sample=False, bad_words_ids=banned
            )
            self.answers[known] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
        return self.answers[known]

    @torch.no_grad()
    def check(
        self, prompt: Prompt, samples: list[Completion], temperature: float = 1.0, skip: int = 0
    ) -> None:
        """Check the log-probs of all but the first `skip` tokens of each sample.

        One forward pass over the sample gives the expected ones.
        """
        for sample in samples:
            inputs = self.inputs(*prompt)
            new = torch.tensor([sample.token_ids])
            inputs["input_ids"] = torch.cat([inputs["input_ids"], new], 1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
                inputs[name] = torch.cat([inputs[name], torch.zeros_like(new)], 1)
            logits = self.model(**inputs).logits[0, -1 - len(sample.token_ids) : -1].float()
            logits /= temperature
            logits[:, self.placeholders] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, new[0, :, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(sample.logprobs)[skip:], expected[skip:], rtol=0, atol=self.atol
            )


@dataclass
class Scene:
    strategy: FSDPStrategy
    reference: Reference

    @property
    def name(self) -> str:
        """What the model reads beside text."""
        return self.reference.name

    @property
    def seen(self) -> list[Prompt]:
        return [(self.reference.framed(text), items) for text, items in SEEN[self.name]]

    @property
    def mine(self) -> list[Prompt]:
        """Of this replica of data: one has all images, the other text alone, or nothing."""
        return self.seen if self.strategy.mesh.data.rank == 0 else [self.seen[1], self.seen[4]]

    def same_as_reference(self, prompts: list[Prompt] | None = None) -> None:
        prompts = prompts or self.seen
        answers = self.strategy.engine.generate(
            [self.reference.request(*prompt) for prompt in prompts], GREEDY
        )
        for prompt, samples in zip(prompts, answers, strict=True):
            assert [sample.token_ids for sample in samples] == [self.reference.greedy(prompt)]
            self.reference.check(prompt, samples)


def text_and_media_in_one_call(scene: Scene) -> None:
    scene.same_as_reference()
    for text, items in scene.seen:
        if items:
            request = Request(
                scene.reference.request(text, items).token_ids, read({scene.name: items})
            )
            expanded = scene.strategy.engine._expanded(request).token_ids
            assert expanded == scene.reference.inputs(text, items)["input_ids"][0].tolist()
    # they make a difference
    assert len({tuple(scene.reference.greedy(prompt)) for prompt in scene.seen}) == 6


def an_image_and_a_video_in_one_prompt(scene: Scene) -> None:
    if scene.strategy.engine.limits.keys() >= {"images", "videos"}:
        text = scene.reference.framed("<video> or <image>, <image>")
        scene.same_as_reference(
            [(text, {"images": [FIRST, CLEAR], "videos": [FILM]}), scene.seen[0]]
        )


def media_may_be_read_before(scene: Scene) -> None:
    """Another thread reads media while the engine does nothing.

    Media that cannot be read are reported when the request begins.
    """
    engine = scene.strategy.engine
    requests = [scene.reference.request(*prompt) for prompt in scene.seen]
    with ThreadPoolExecutor(1) as thread:
        prepared = list(thread.map(engine.prepare, requests))
    expects = [engine.axis.size == 1 and bool(items) for _, items in scene.seen]
    assert [request.expanded is not None for request in prepared] == expects
    answers = engine.generate(prepared, GREEDY)
    assert [samples[0].token_ids for samples in answers] == [
        scene.reference.greedy(prompt) for prompt in scene.seen
    ]

    for request, message in IMPOSSIBLE[scene.name]:
        with pytest.raises(ValueError, match=message):
            engine.generate([Request([66]), engine.prepare(request)], GREEDY)


def samples_share_the_images_of_their_prompt(scene: Scene) -> None:
    sampling = Sampling(n=3, max_tokens=6, temperature=0.7, seed=3)
    requests = [scene.reference.request(*prompt) for prompt in scene.seen]
    answers = scene.strategy.engine.generate(requests, sampling)
    for prompt, samples in zip(scene.seen, answers, strict=True):
        assert len({tuple(sample.token_ids) for sample in samples}) > 1
        scene.reference.check(prompt, samples, temperature=0.7)
    again = scene.strategy.engine.generate(requests, sampling)
    assert [[sample.token_ids for sample in samples] for samples in again] == [
        [sample.token_ids for sample in samples] for samples in answers
    ]


def what_follows_a_first_token_sees_the_images(scene: Scene) -> None:
    sampling = Sampling(n=2, max_tokens=6, first_token_temperature=5.0, seed=1)
    answers = scene.strategy.engine.generate(
        [scene.reference.request(*prompt) for prompt in scene.seen], sampling
    )
    for prompt, samples in zip(scene.seen, answers, strict=True):
        scene.reference.check(prompt, samples, skip=1)


def a_response_goes_on(scene: Scene) -> None:
    """As in partial rollouts, a request has a prompt with images and some of the response."""
    whole = scene.reference.greedy(scene.seen[2])
    grown = scene.reference.request(*scene.seen[2]).followed_by(whole[:4])
    ((sample,),) = scene.strategy.engine.generate([grown], Sampling(temperature=0, max_tokens=6))
    assert sample.token_ids == whole[4:]


def the_same_image_under_new_weights(scene: Scene) -> None:
    engine = scene.strategy.engine
    first = scene.reference.model
    for seed in (1, 2):
        scene.reference.model = perturbed(first, seed)
        engine.load_weights(scene.reference.model.named_parameters(), version=seed + 1)
        scene.same_as_reference(scene.seen[:4])
    scene.reference.model = first
    engine.load_weights(first.named_parameters(), version=1)
    scene.same_as_reference(scene.seen[:4])


def the_same_image_under_weights_that_come_in_flight(scene: Scene) -> None:
    """No output of an encoder of the old weights is used for a request that begins later."""
    engine = scene.strategy.engine
    first = scene.reference.model
    prompts = scene.seen[:4]
    requests = [scene.reference.request(*prompt) for prompt in prompts]
    loop = engine.open(GREEDY)
    loop.add([*requests, Request([66], sampling=Sampling(temperature=0, max_tokens=120))])
    loop.step()

    scene.reference.model = perturbed(first, 3)
    loop.load_weights(scene.reference.model.named_parameters(), version=4)
    later = loop.add(requests)
    found = dict(loop.to_the_end())
    assert len(found[4][0].token_ids) == 120 or found[4][0].finish_reason == "stop"
    for index, prompt in zip(later, prompts, strict=True):
        assert [sample.token_ids for sample in found[index]] == [scene.reference.greedy(prompt)]
        scene.reference.check(prompt, found[index])

    scene.reference.model = first
    engine.load_weights(first.named_parameters(), version=1)
    scene.same_as_reference(prompts)


UNUSED = {"llava": (".encoder.layers.1.", "post_layernorm"), "qwen2_5_omni_thinker": (".visual.",)}
"""Parts of a model that vLLM does not have: for what it does not use, or for media of which prompts
have none."""


def weights_behind_images_are_proven(scene: Scene) -> None:
    """The engine verifies every weight behind the images; hf keeps all as they came."""
    engine = scene.strategy.engine
    if scene.strategy.engine_name == "hf":
        return

    prints = engine._fingerprints(torch.float32, None)
    held = {*prints.bits, *prints.products}
    unused = UNUSED.get(scene.reference.model.config.model_type, ())
    assert held == {
        name for name in engine.expected if not any(module in name for module in unused)
    }
    bench = Bench(engine, scene.reference.model)
    others = "text_model", "language_model", "layers.1", "blocks.1"
    flipped_elements_are_named(
        bench, [name for name in sorted(held) if not any(other in name for other in others)]
    )
    scene.same_as_reference(scene.seen[:1])


@torch.no_grad()
def its_parts_are_called_as_in_a_model_of_text(scene: Scene) -> None:
    tokens = [65, 66, 67]
    probe = Probe(3)
    with probe.attached(scene.reference.model):
        expected = probe.recorded(scene.reference.model(torch.tensor([tokens])).logits[0, -1])

    found = scene.strategy.engine.module_outputs(tokens)
    for name in (
        "model.embed_tokens",
        "model.layers.1.self_attn.o_proj",
        "model.layers.0.mlp",
        "lm_head",
    ):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


IMPOSSIBLE: dict[str, list[tuple[Request, str]]] = {
    "images": [
        (Request([IMAGE, 65]), "request 1 has 0 images and 1 placeholders"),
        (Request([65], {"images": [picture(1)]}), "has 1 images and 0 placeholders"),
        (
            Request([IMAGE] * 4, {"images": [picture(1)] * 4}),
            "4 images, more than --limit_mm_image_per_prompt 3",
        ),
        (
            Request([IMAGE], {"images": ["cat.png"]}),
            "has media that cannot be read: images: a str is not an image: pass PIL",
        ),
        (
            Request([IMAGE], {"images": [FIRST], "audios": [1]}),
            "carries audios: this engine supports only text and images",
        ),
        (
            Request([IMAGE] + [65] * 120, {"images": [picture(1)]}),
            r"does not fit: 12\d prompt tokens and max_tokens 10",
        ),
    ],
    "videos": [
        (Request([IMAGE + 1, 65]), "request 1 has 0 videos and 1 placeholders"),
        (Request([65], {"videos": [FILM]}), "has 1 videos and 0 placeholders"),
        (Request([IMAGE], {"videos": [FILM]}), "has 0 images and 1 placeholders"),
        (
            Request([IMAGE + 1] * 3, {"videos": [FILM] * 3}),
            "3 videos, more than --limit_mm_video_per_prompt 2",
        ),
        (
            Request([IMAGE + 1], {"videos": [FIRST]}),
            "has media that cannot be read: videos: a Image is not a video: pass frames",
        ),
        (
            Request([IMAGE + 1], {"videos": [np.zeros((2, 4, 4))]}),
            "frames must be .* uint8, and these are .2, 4, 4. of float64",
        ),
    ],
    "audios": [
        (Request([IMAGE, 65]), "request 1 has 0 audios and 1 placeholders"),
        (Request([65], {"audios": [HEARD]}), "has 1 audios and 0 placeholders"),
        (
            Request([IMAGE] * 3, {"audios": [HEARD] * 3}),
            "3 audios, more than --limit_mm_audio_per_prompt 2",
        ),
        (
            Request([IMAGE], {"audios": ["nothing.wav"]}),
            "has media that cannot be read: audios: .*No such file.*nothing.wav",
        ),
        (
            Request([IMAGE], {"audios": [clip(1, rate=8000)]}),
            "8000 samples per second; the model needs 16000",
        ),
        (
            Request([IMAGE], {"audios": [clip(1, 31)]}),
            "cannot be read: 31.0 s, and the model accepts at most [13]0? s: cut it",
        ),
        (
            Request([IMAGE], {"videos": [1]}),
            "carries videos: this engine supports only text and audios",
        ),
        (
            Request([IMAGE] + [65] * 115, {"audios": [HEARD]}),
            r"does not fit: 120 prompt tokens and max_tokens 10",
        ),
    ],
}


def impossible_media_are_refused(scene: Scene) -> None:
    others = (
        "carries videos: this engine supports only text and images; --engine_type hf also supports"
        " videos"
    )
    more = (
        [(Request([IMAGE], {"videos": [FILM]}), others)]
        if scene.strategy.engine_name == "sglang"
        else []
    )

    for request, message in IMPOSSIBLE[scene.name] + more:
        with pytest.raises(ValueError, match=message):
            scene.strategy.engine.generate([Request([66]), request], GREEDY)

    scene.same_as_reference(scene.seen[:1])


def ranks_of_an_engine_need_the_same_images(scene: Scene) -> None:
    if scene.strategy.engine.axis.size > 1:
        different = DIFFERENT[scene.name](scene.strategy.get_rank())
        token = IMAGE + (scene.name == "videos")
        with pytest.raises(ValueError, match="the same requests"):
            scene.strategy.engine.generate([Request([token], {scene.name: [different]})], GREEDY)


def each_rank_gets_its_own_answers(scene: Scene) -> None:
    """All images on one rank, text alone or nothing on the other; nested and flat, ids and text."""
    ids = [scene.reference.request(*prompt).token_ids for prompt in scene.mine]
    texts = [text for text, _ in scene.mine]
    items = [items for _, items in scene.mine]
    flat = [item for some in items for item in some]
    counts = [len(some) for some in items]

    expected = [scene.reference.greedy(prompt) for prompt in scene.mine]
    none = [some or None for some in items] if flat else None
    with scene.strategy.engine_awake():
        for answers in (
            gathered(scene, ids, none),
            gathered(scene, texts=texts, items=flat, counts=counts),
        ):
            assert [samples[0].token_ids for samples in answers] == expected
            assert scene.strategy.engine_status is EngineStatus.WAKEUP
            for prompt, samples in zip(scene.mine, answers, strict=True):
                scene.reference.check(prompt, samples)

        only = scene.mine if flat else []
        answers = gathered(
            scene, [ids for ids, _ in zip(ids, only, strict=False)], items if only else []
        )
        assert [samples[0].token_ids for samples in answers] == expected[: len(only)]


def gathered(
    scene: Scene,
    ids: list | None = None,
    items: list | None = None,
    *,
    texts: list[str] | None = None,
    counts: list[int] | None = None,
    sleeps: bool = True,
) -> list[list[Completion]]:
    media = {f"all_{scene.name}": items, f"{scene.name}_num": counts}
    return scene.strategy.gather_and_generate(
        GREEDY, ids, all_prompts=texts, sleep_engine=sleeps, **media
    )


def a_prompt_without_images_has_no_placeholders(scene: Scene) -> None:
    mark = IN_TEXT[scene.name]
    _, items = scene.seen[0]
    without, alone = map(scene.reference.framed, (f"a{mark}b", mark))
    with scene.strategy.engine_awake():
        answers = gathered(scene, texts=[without, alone], items=[None, items])
    assert [samples[0].token_ids for samples in answers] == [
        scene.reference.greedy(prompt) for prompt in (("ab", []), (alone, items))
    ]


def local_answers(scene: Scene) -> None:
    medium = MEDIA_NAMES[scene.name]
    inputs = [{"prompt": text, "multi_modal_data": {medium: items}} for text, items in scene.seen]
    ids = scene.reference.request(*scene.seen[0]).token_ids
    alone = (
        scene.seen[0][1][0]
        if scene.name != "videos"
        else np.stack([np.asarray(frame) for frame in FILM])
    )
    inputs[0] = {"prompt_token_ids": ids, "multi_modal_data": {medium: alone}}

    with scene.strategy.engine_awake():
        dicts = scene.strategy.engine_generate_local(GREEDY, multi_modal_inputs=inputs)
        for given in ({}, {"prompt_token_ids": [[65]], "multi_modal_inputs": inputs}):
            with pytest.raises(ValueError, match="give prompt_token_ids or multi_modal_inputs"):
                scene.strategy.engine_generate_local(GREEDY, **given)

    for prompt, answer in zip(scene.seen, dicts, strict=True):
        assert answer.prompt_token_ids == scene.reference.request(*prompt).token_ids
        assert answer.output_token_ids == scene.reference.greedy(prompt)


def it_sleeps_afterwards(scene: Scene) -> None:
    made = scene.strategy
    prompt, *_ = scene.seen
    seen = []
    for sleeps in (False, True):
        made.maybe_sleep_inference_engine()
        answers = gathered(
            scene, [scene.reference.request(*prompt).token_ids], [prompt[1]], sleeps=sleeps
        )
        assert answers[0][0].token_ids == scene.reference.greedy(prompt)
        seen.append(made.engine_status)

    assert seen == [EngineStatus.WAKEUP, EngineStatus.SLEEPED]
    made.wakeup_inference_engine()


CASES: list[Callable[[Scene], None]] = [
    text_and_media_in_one_call,
    media_may_be_read_before,
    samples_share_the_images_of_their_prompt,
    what_follows_a_first_token_sees_the_images,
    a_response_goes_on,
    the_same_image_under_new_weights,
    the_same_image_under_weights_that_come_in_flight,
    weights_behind_images_are_proven,
    its_parts_are_called_as_in_a_model_of_text,
    impossible_media_are_refused,
    ranks_of_an_engine_need_the_same_images,
    each_rank_gets_its_own_answers,
    a_prompt_without_images_has_no_placeholders,
    local_answers,
    it_sleeps_afterwards,
]
OF_MORE: list[Callable[[Scene], None]] = [
    text_and_media_in_one_call,
    an_image_and_a_video_in_one_prompt,
    samples_share_the_images_of_their_prompt,
    a_response_goes_on,
    the_same_image_under_new_weights,
    impossible_media_are_refused,
    ranks_of_an_engine_need_the_same_images,
    each_rank_gets_its_own_answers,
    a_prompt_without_images_has_no_placeholders,
    local_answers,
]
"""Of the second medium of a model."""
OF_FAMILY: list[Callable[[Scene], None]] = [
    text_and_media_in_one_call,
    an_image_and_a_video_in_one_prompt,
    a_response_goes_on,
    the_same_image_under_new_weights,
    weights_behind_images_are_proven,
    its_parts_are_called_as_in_a_model_of_text,
    impossible_media_are_refused,
    ranks_of_an_engine_need_the_same_images,
]
"""Of a further family in the same engine: what depends on the model, and not on the engine and the
strategy alone."""


def cases_of(
    scenes: list[Scene], *, further_family: bool
) -> list[tuple[Scene, Callable[[Scene], None]]]:
    if further_family:
        chosen = [*product(scenes[:1], OF_FAMILY), *product(scenes[1:], OF_FAMILY[:4])]
    else:
        chosen = [*product(scenes[:1], CASES), *product(scenes[1:], OF_MORE)]
    return chosen


def outcomes(
    engine_type: str, sizes: list[int], sp_size: int, families: bool, *folders: str
) -> dict[str, str]:
    """Case -> traceback, empty when it passed.

    The engine's weights are streamed from a sharded actor.

    `sizes` are the numbers of ranks of an engine, in turn, for the models in `folders`. With
    `families` they have only the cases of a further family.
    """
    results = {}
    for folder, size in zip(folders, cycle(sizes), strict=False):
        made = FSDPStrategy(
            args={
                "fsdp": True,
                "pretrain": folder,
                "engine_type": engine_type,
                "engine_tp_size": size,
                "sp_size": sp_size,
                "prompt_max_len": 112,
                "generate_max_len": 16,
                "limit_mm_image_per_prompt": 3,
                "limit_mm_audio_per_prompt": 2,
                "limit_mm_video_per_prompt": 2,
                "engine_kv_cache_gb": 0.05,
                "micro_rollout_batch_size": 3,
            }
        )
        made.setup_distributed()
        model = load_model(ModelSection(pretrain=folder))
        # its forward pass cannot be divided
        made.setup_inference_engine(actor=made.prepare(model) if sp_size == 1 else None)
        made.wakeup_inference_engine()

        # Layers with a state compute a prompt in chunks, and then token by token.
        atol = 2e-5 if Path(folder).name == "qwen3_5" else 1e-5
        scenes = [Scene(made, Reference(folder, name, atol)) for name in made.engine.limits]
        for scene, case in cases_of(scenes, further_family=families):
            try:
                case(scene)
            except BaseException:
                results[
                    f"{case.__name__}, {scene.name}, {Path(folder).name}, {size} ranks per engine"
                ] = traceback.format_exc()

        made.close_engine()

    return results


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize(
    ("engine_type", "sizes", "ranks", "sp_size", "seconds"),
    [
        pytest.param("hf", [1], 1, 1, 0, marks=pytest.mark.slow),
        pytest.param(
            "hf", [1], 2, 2, 1, marks=pytest.mark.slow, id="two engines answer one replica of data"
        ),
        pytest.param("vllm", [2, 1], 2, 1, 30, marks=pytest.mark.slow, id="vllm"),
    ],
)
def test_media(
    seeing: str,
    tmp_path: Path,
    engine_type: str,
    sizes: list[int],
    ranks: int,
    sp_size: int,
    seconds: int,
) -> None:
    """Run the cases on a model that sees, and on one that hears if `seconds` are allowed for it.

    Without them the second is a model whose images attend to all of themselves.
    """
    if engine_type == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
        load_vllm()

    others = (
        [hearing_model(tmp_path / "hearing", seconds)]
        if seconds
        else [seeing_gemma(tmp_path / "gemma3")]
    )
    failures = run_ranks(
        ranks, outcomes, engine_type, sizes, sp_size, False, seeing, *others, timeout=500
    )
    assert failures == [{}] * ranks, "\n".join(
        f"{case}\n{trace}" for rank in failures for case, trace in rank.items()
    )


def outcomes_of_qwen(
    engine_type: str, sizes: list[int], folder: Path, *families: str
) -> list[dict[str, str]]:
    """Run in the environment that has torchvision: the processors need it.

    An engine of SGLang's on one rank has all cases.
    """
    few = engine_type == "hf" or sizes == [2]
    folders = [
        omni(folder / family, 1) if family == "omni" else seeing_qwen(folder / family, family)
        for family in families
    ]
    return run_ranks(max(sizes), outcomes, engine_type, sizes, 1, few, *folders, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine_type", "sizes", "families"),
    [
        ("sglang", [2], ["qwen2_5_vl"]),
        ("sglang", [1], ["qwen3_vl"]),
        ("hf", [1], ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "omni"]),
    ],
)
def test_images_in_rows_and_columns(
    tmp_path: Path, engine_type: str, sizes: list[int], families: list[str]
) -> None:
    failures = in_sglang_environment(outcomes_of_qwen, engine_type, sizes, tmp_path, *families)
    assert failures == [{}] * max(sizes), "\n".join(
        f"{case}\n{trace}" for rank in failures for case, trace in rank.items()
    )


def outcomes_of_families(folder: Path) -> list[dict[str, str]]:
    load_vllm()
    made = {
        "smolvlm": partial(seeing_model, family="smolvlm"),
        "internvl": seeing_internvl,
        "llava": seeing_llava,
    }
    made |= {
        family: partial(seeing_qwen, family=family)
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    }
    folders = [make(folder / family) for family, make in (made | {"omni": omni}).items()]
    transformers_model(folder / "omni").save_pretrained(folder / "thinker")

    run_ranks(
        1,
        gemma_reads_text_only,
        seeing_gemma(folder / "gemma3"),
        str(folder / "thinker"),
        timeout=200,
    )
    return run_ranks(1, outcomes, "vllm", [1], 1, True, *folders, timeout=500)


def gemma_reads_text_only(folder: str, thinker: str) -> None:
    """vLLM on a CPU lets the tokens of an image attend only to earlier ones, unlike transformers.

    It also refuses a thinker without the rest of the folder.
    """
    with pytest.raises(
        ValueError,
        match=(
            "the folder has the thinker of a Qwen2.5-Omni alone, and vLLM reads whole folders only"
        ),
    ):
        start_engine("vllm", thinker, ALONE)

    engine = start_engine("vllm", folder, ALONE)
    assert len(engine.generate([Request([65, 66])], GREEDY)) == 1
    with pytest.raises(
        ValueError,
        match=(
            "carries images: this engine supports only text; --engine_type hf also supports images"
        ),
    ):
        engine.generate([Request([65, IMAGE], {"images": [FIRST]})], GREEDY)

    engine.close()


@pytest.mark.slow
def test_families_that_need_torchvision_in_vllm(tmp_path: Path) -> None:
    failures = beside_torchvision(outcomes_of_families, tmp_path)
    assert failures == [{}], "\n".join(
        f"{case}\n{trace}" for rank in failures for case, trace in rank.items()
    )


def read_in_bfloat16(folder: str) -> list[str]:
    """Check the log-probs of responses to images and videos, and return the media."""
    made = FSDPStrategy(
        args={
            "fsdp": True,
            "bf16": True,
            "pretrain": folder,
            "engine_type": "vllm",
            "prompt_max_len": 112,
            "generate_max_len": 16,
            "limit_mm_image_per_prompt": 3,
            "limit_mm_video_per_prompt": 2,
            "engine_kv_cache_gb": 0.05,
        }
    )
    made.setup_distributed()
    made.setup_inference_engine(actor=made.prepare(load_model(ModelSection(pretrain=folder))))
    made.wakeup_inference_engine()

    for name in made.engine.limits:
        scene = Scene(made, Reference(folder, name, atol=0.1))
        scene.reference.model.bfloat16()
        answers = made.engine.generate(
            [scene.reference.request(*prompt) for prompt in scene.seen], GREEDY
        )
        for prompt, samples in zip(scene.seen, answers, strict=True):
            scene.reference.check(prompt, samples)
        assert answers[0] == answers[3] != answers[6], "the same question, about another picture"

    media = [*made.engine.limits]
    made.close_engine()
    return media


def media_of_a_hybrid(folder: Path) -> list[str]:
    load_vllm()
    return run_ranks(1, read_in_bfloat16, seeing_qwen(folder, "qwen3_5"), timeout=300)[0]


@pytest.mark.slow
def test_a_hybrid_that_sees_in_vllm(tmp_path: Path) -> None:
    """On a CPU vLLM's kernel of linear attention computes only bfloat16."""
    assert beside_torchvision(media_of_a_hybrid, tmp_path) == ["images", "videos"]


# -- without a model


def test_media_of_each_prompt():
    assert per_prompt(None, None, 2, "images") == [[], []]
    assert per_prompt([None, 5, [6, 7], []], None, 4, "images") == [[], [5], [6, 7], []]
    assert per_prompt([5, 6, 7], [1, 0, 2], 3, "images") == [[5], [], [6, 7]]
    assert per_prompt([], [], 0, "images") == per_prompt([], None, 0, "images") == []
    with pytest.raises(ValueError, match="all_images has 2 entries for 3 prompts.*images_num"):
        per_prompt([5, 6], None, 3, "images")
    with pytest.raises(
        ValueError, match="videos_num counts 2 videos of 2 prompts, and there are 3 of 2"
    ):
        per_prompt([5, 6, 7], [1, 1], 2, "videos")


def test_placeholders_without_media_are_left_out_with_their_frame():
    both = {"image": frozenset([3]), "video": frozenset([4])}
    plain = Vocabulary(9, frozenset(), (3, 4), "", placeholders=both)
    framed = Vocabulary(9, frozenset(), (3, 4), "", placeholders=both, frame=(1, 2))
    assert plain.without_placeholders([1, 3, 2, 3, 5], "image") == [1, 2, 5]
    assert framed.without_placeholders([1, 3, 3, 2, 5, 1, 2, 1, 4, 2, 3], "image") == [
        5,
        1,
        2,
        1,
        4,
        2,
    ]
    assert framed.without_placeholders([3], "audio") == [3]
    reader = PromptReader(framed, special_tokens=False)
    one, two = reader.requests(
        [[1, 3, 2, 1, 4, 2], [1, 3, 2, 1, 4, 2]],
        None,
        {"images": ([["x"], None], None), "videos": ([None, ["y"]], None)},
    )
    assert (one.token_ids, one.multi_modal) == ([1, 3, 2], {"images": ["x"]})
    assert (two.token_ids, two.multi_modal) == ([1, 4, 2], {"videos": ["y"]})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt_token_ids": [1], "multi_modal_data": {"images": []}},
        {"prompt_token_ids": [1], "image": 3},
    ],
    ids=str,
)
def test_inputs_without_a_prompt_are_refused(given):
    with pytest.raises(ValueError, match="a multi-modal input has prompt or prompt_token_ids"):
        PromptReader(Vocabulary(9, frozenset(), (), ""), special_tokens=False).local(given)


def test_requests_with_other_pixels_differ():
    def of(*images: Image.Image) -> str:
        return digest(Request([1], {"images": list(images)}))

    white = Image.new("RGB", (2, 3), "white")
    changed = white.copy()
    changed.putpixel((1, 2), (255, 255, 254))
    clear = Image.new("RGBA", (2, 3), (255, 255, 255, 0))
    assert of(white) == of(white.copy()) == of(white.convert("L")) == of(clear)
    assert (
        len(
            {
                digest(Request([1])),
                of(white),
                of(changed),
                of(white, white),
                of(white.resize((3, 2))),
            }
        )
        == 5
    )


def test_the_forms_of_a_clip(tmp_path):
    waveform = np.array([0, 0.5, -1, 0.25], np.float32)
    as_numbers = {
        1: np.array([128, 192, 0, 160], np.uint8),
        2: (waveform * 2**15).astype(np.int16),
        4: (waveform.astype(np.float64) * 2**31).astype(np.int32),
    }

    for size, numbers in as_numbers.items():
        with wave.open(str(tmp_path / f"{size}.wav"), "wb") as file:
            file.setnchannels(2), file.setsampwidth(size), file.setframerate(8000)
            file.writeframes(np.repeat(numbers, 2).tobytes())

    forms = [
        Clip(waveform, 8000),
        (waveform, 8000),
        {"array": waveform.astype(np.float64), "sampling_rate": 8000, "path": None},
        *(tmp_path / f"{size}.wav" for size in as_numbers),
        str(tmp_path / "2.wav"),
    ]
    for found in map(Clip.of, forms):
        assert (found.waveform.dtype, found.sampling_rate) == (np.float32, 8000) and np.array_equal(
            found.waveform, waveform
        )

    assert as_list(forms[1]) == [forms[1]] and as_list(forms[1:3]) == forms[1:3]
    assert len({digest(Request([1], {"audios": [form]})) for form in forms}) == 1
    assert digest(Request([1], {"audios": [(waveform, 16000)]})) != digest(
        Request([1], {"audios": forms[:1]})
    )
    (tmp_path / "none.wav").write_bytes(b"RIFFWAVE")

    for form, message in (
        ((waveform * 2**15).astype(np.int16), "a ndarray is not an audio clip"),
        ((waveform.astype(np.int16), 8000), "floats.* of int16"),
        ((np.zeros((4, 2)), 8000), r"\[N\] of floats, and this one is \[4, 2\]"),
        ((waveform[:0], 8000), r"this one is \[0\]"),
        (tmp_path / "none.wav", "none.wav is not a .wav file"),
    ):
        with pytest.raises(ValueError, match=f"audios: .*{message}"):
            read({"audios": [form]})


def test_smaller_images_are_filled_up():
    one = {"pixels": torch.ones(1, 2, 3)}
    two = {"pixels": torch.full((2, 1, 4), 2.0)}
    whole = concatenated_features([one, two])["pixels"]
    assert whole.shape == (3, 2, 4) and whole.sum() == one["pixels"].sum() + two["pixels"].sum()
    assert torch.equal(whole[0, :, :3], one["pixels"][0]) and torch.equal(
        whole[1:, :1], two["pixels"]
    )
    assert concatenated_features([]) == {}


def test_a_model_of_text_reads_no_images(tmp_path):
    engine = start_engine("hf", tiny_model(tmp_path), ALONE)
    with pytest.raises(
        ValueError, match="request 0 carries images: this engine supports only text"
    ):
        engine.generate([Request([65], {"images": [FIRST]})], GREEDY)
    with pytest.raises(ConfigError, match="--images_key: this engine supports only text"):
        engine.check_media(["images"])


def test_the_form_of_a_model_that_engines_load():
    """The model keeps the towers unless it is trained as a model of text."""
    for config, media in (
        (Qwen3Config(), {}),
        (Idefics3Config(), {"images": 4}),
        (Gemma3Config(), {"images": 4}),
        (Qwen2_5_VLConfig(), {"images": 4, "videos": 0}),
        (Qwen2AudioConfig(), {"audios": 1}),
    ):
        assert media_limits(EngineSection(), config) == media


def test_positions_in_space_are_known_from_the_configuration():
    """As released models write them."""
    spatial = Qwen2_5_VLConfig(
        text_config={"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    )
    assert has_positions_in_space(spatial)
    assert not has_positions_in_space(Idefics3Config()) and not has_positions_in_space(
        Qwen3Config()
    )
