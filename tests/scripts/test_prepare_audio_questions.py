"""Questions about sound: from a folder of generated clips to prompts that the recipe reads.

The recipe scores them, too.
"""

import io
import json
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from lightrft.config import parse
from lightrft.core.samples import Prompt, Sample
from lightrft.data.media_files import open_media
from lightrft.data.prompts import load_prompts
from lightrft.rewards.functions import rewards
from scripts.prepare_audio_questions import letter_of, main
from tiny import byte_tokenizer

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "grpo_audio_qwen2_audio_7b.yaml"
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text or '@' }}{% endfor %}{%"
    " endfor %}"
)


def wav(seconds: float, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(
            (8000 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate))
            .astype(np.int16)
            .tobytes()
        )
    return file.getvalue()


def test_questions_are_what_the_recipe_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "bell.wav").write_bytes(wav(0.5, 8000))
    question = {"q": "What is heard?", "choices": ["rain", "a bell"], "answer": "a bell"}
    good = question | {"sound": "bell.wav"}
    rows = [
        good,
        good | {"sound": "none.wav"},
        good | {"answer": "a dog"},
        good | {"choices": ["rain"]},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    inside = [
        question | {"sound": {"path": None, "bytes": wav(seconds, 16000)}} for seconds in (0.25, 2)
    ]
    Dataset.from_list(inside).to_parquet(str(tmp_path / "test.parquet"))
    out = tmp_path / "data" / "audio_questions"
    main(
        [
            f"--source={tmp_path}",
            f"--out={out}",
            "--question_key=q",
            "--audio_key=sound",
            "--longest=1",
        ]
    )

    assert (
        "train.jsonl: 1 questions" in (said := capsys.readouterr().out)
        and "test.jsonl: 1 questions" in said
    )
    monkeypatch.chdir(tmp_path)
    config = parse([f"--config={CONFIG}"])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    data = replace(config.data, system_prompt=None)
    (prompt,), (held_out,) = (
        load_prompts(data, tokenizer),
        load_prompts(data, tokenizer, source="eval_data"),
    )
    assert (
        prompt.text == held_out.text == "@What is heard?\nA. rain\nB. a bell"
        and prompt.columns["label"] == "B"
    )
    clip = open_media(prompt.multi_modal)["audios"][0]
    assert (
        clip["sampling_rate"] == 16000
        and len(clip["array"]) == 8000
        and 0.2 < np.abs(clip["array"]).max() < 0.3
    )
    score = rewards[config.reward.reward]

    said = [
        Sample(Prompt(0, "", [1]), 0, [1], [0.0], text, "stop")
        for text in ("It rings. (B)", "It drops. (A)", "B or A")
    ]
    assert score(said, ["B"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "letter"), [("a", "A"), ("c d", "B"), (1, "B"), ("(B)", "B"), ("b.", "B")]
)
def test_the_answer_is_one_of_the_choices(answer, letter):
    assert letter_of(answer, ["a", "c d"]) == letter
    for wrong in ("x", 2, None, "C"):
        with pytest.raises(ValueError, match="is none of the 2 choices"):
            letter_of(wrong, ["a", "c d"])
