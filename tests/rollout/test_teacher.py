"""Why: what a teacher adds to an advantage is a difference of two log-probs of the same token; one
place off, and the student learns something else. The teacher here is a model beside the actor, or
the same one behind HTTP.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lightrft.algorithms.kl import KLCoefficient
from lightrft.algorithms.shaping import RewardShaper
from lightrft.config import AlgorithmSection, ModelSection, RewardSection, TrainSection
from lightrft.models.load import check_vocabulary
from lightrft.observe.metrics import Metrics
from lightrft.parallel.collectives import Axis
from lightrft.roles.remote_teacher import RemoteTeacher
from lightrft.stages.build import experience_maker
from ranks import run_ranks
from roles import rows
from rollout.test_critic_step import LEFT_OUT, SHAPES, logprobs, response, samples
from teacher_server import teacher_server
from tiny import byte_tokenizer, tiny_model

SECTION = AlgorithmSection(
    advantage_estimator="reinforce", distill_coef=0.5, advantage_clip=1.5, length_filter=[1, 8]
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("models")
    return tiny_model(path / "actor"), tiny_model(path / "teacher", seed=1)


def taught(
    folder: str, teacher: str, held: list[int], temperature: float
) -> tuple[dict[int, torch.Tensor], dict[str, float]]:
    made = rows.strategy()
    policy = rows.policy(made, folder, max_tokens=24)
    metrics = Metrics()
    data = made.mesh.data
    policy.temperature = temperature

    if teacher.startswith("http"):
        asked = RemoteTeacher(
            teacher, AutoTokenizer.from_pretrained(folder), made.mesh.model_parallel
        )
    else:
        asked = rows.policy(made, teacher, max_tokens=24)
        asked.temperature = temperature

    make = experience_maker(
        policy,
        SECTION,
        TrainSection(train_batch_size=8, max_tokens_per_microbatch=24),
        shaper=RewardShaper(RewardSection(), longest=10),
        kl_coefficient=KLCoefficient(0.0),
        teacher=asked,
    )
    experience = make(
        samples()[sum(held[: data.rank]) : sum(held[: data.rank + 1])], metrics
    ).experience
    parts = experience.advantages.split(experience.lengths.tolist())

    return dict(zip(experience.rows.tolist(), parts, strict=True)), metrics.reduce(data)


@pytest.mark.parametrize(
    ("held", "remote"), [([8], False), ([3, 5], True), ([8, 0], True)], ids=str
)
def test_what_a_teacher_adds(folders, held, remote):
    """It adds half the difference to the reward-to-go of the task, and both are clipped together.

    Over HTTP the temperature is 1.
    """
    temperature = 1.0 if remote else rows.TEMPERATURE
    if remote:
        with teacher_server(folders[1]) as url:
            results = run_ranks(len(held), taught, folders[0], url, held, temperature)
    else:
        results = run_ranks(len(held), taught, *folders, held, temperature)

    found = {row: advantages for result, _ in results for row, advantages in result.items()}
    actor, teacher = (rows.plain_model(folder) for folder in folders)
    gaps = []
    clipped = 0

    for row, (prompt, _, reward) in enumerate(SHAPES):
        if row == LEFT_OUT:
            assert not found[row].any()
            continue
        with torch.no_grad():
            gap = logprobs(teacher, row, temperature) - logprobs(actor, row, temperature)
        gaps.append(gap)
        expected = (reward + 0.5 * gap).clamp(-1.5, 1.5)
        clipped += int((expected.abs() == 1.5).sum())
        torch.testing.assert_close(found[row][response(row)], expected, rtol=1e-4, atol=2e-5)
        assert not found[row][:prompt].any()

    assert 0 < clipped < len(torch.cat(gaps)) / 2
    assert results[0][1]["rollout/teacher_kl"] == pytest.approx(
        -torch.cat(gaps).mean().item(), abs=1e-4
    )


def test_another_vocabulary_is_refused(folders, tmp_path):
    tokenizer = byte_tokenizer()
    other = tmp_path / "other"
    (Path(tiny_model(other)) / "tokenizer.json").write_text(
        (Path(folders[1]) / "tokenizer.json")
        .read_text()
        .replace('"a":97', '"a":98')
        .replace('"a": 97', '"a": 98')
        .replace('"b":98', '"b":97')
        .replace('"b": 98', '"b": 97')
    )
    check_vocabulary(ModelSection(teacher_pretrain=folders[1]), "teacher_pretrain", tokenizer)

    with pytest.raises(
        ValueError,
        match=(
            "has another vocabulary: 2 of the 384 tokens .* the first is 'a', 97 in --pretrain and"
            " 98 there"
        ),
    ):
        check_vocabulary(ModelSection(teacher_pretrain=str(other)), "teacher_pretrain", tokenizer)


def alone() -> Axis:
    return Axis("model_parallel", 1, 0, None)


def test_a_server_with_another_vocabulary_is_refused(folders):
    class Shifted:
        """Token 60 and all others mean the next character."""

        all_special_ids: list[int] = []

        def __len__(self) -> int:
            return 256

        def decode(self, ids: list[int]) -> str:
            return chr(ids[0] + 1)

    says = "has another vocabulary: token 32 is ' ' there and '!'"
    with teacher_server(folders[1]) as url, pytest.raises(ValueError, match=says):
        RemoteTeacher(url, Shifted(), alone())


@pytest.mark.slow
def test_a_busy_server_is_asked_again_and_a_wrong_one_is_not(folders, monkeypatch):
    with teacher_server(folders[1], busy=3) as url:
        assert RemoteTeacher(url, byte_tokenizer(), alone())._model == "teacher"
    with teacher_server(folders[1], key="secret") as url:
        with pytest.raises(ValueError, match="GET models ended with 401"):
            RemoteTeacher(url, byte_tokenizer(), alone())
        monkeypatch.setenv("TEACHER_API_KEY", "secret")
        assert RemoteTeacher(url, byte_tokenizer(), alone())._model == "teacher"

    with (
        teacher_server(folders[1], short=True) as url,
        pytest.raises(ValueError, match="63 tokens were sent, but 62 log-probs"),
    ):
        RemoteTeacher(url, byte_tokenizer(), alone())

    with (
        teacher_server(folders[1]) as url,
        pytest.raises(ValueError, match="GET models ended with 400"),
    ):
        RemoteTeacher(f"{url}/deep", byte_tokenizer(), alone())
