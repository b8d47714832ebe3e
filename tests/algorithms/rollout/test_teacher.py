"""Why: what a teacher adds to an advantage is a difference of two log-probs of the same token; one
place off, and the student learns something else. The teacher here is a model beside the actor, or
the same one behind HTTP.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from algorithms.roles import rows
from algorithms.rollout.test_critic_step import LEFT_OUT, SHAPES, logprobs, response, samples
from lightrft.algorithms.kl import KLCoefficient
from lightrft.algorithms.roles.remote_teacher import RemoteTeacher
from lightrft.algorithms.roles.teacher import Teachers
from lightrft.algorithms.rollout.teacher_columns import TeacherColumns
from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.stages.build import experience_maker
from lightrft.algorithms.stages.compare import compare_rewards
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection, DataSection, ModelSection, RewardSection, TrainSection
from lightrft.core.batch import Experience
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.core.samples import Sample
from lightrft.models.load import check_vocabulary
from lightrft.models.parallel.collectives import Axis
from ranks import run_ranks
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
        compare=compare_rewards(SECTION, RewardShaper(RewardSection(), longest=10), {}),
        kl_coefficient=KLCoefficient(0.0),
        teacher=asked,
    )
    experience = make(
        samples()[sum(held[: data.rank]) : sum(held[: data.rank + 1])], metrics
    ).experience
    pieces = experience.advantages.split(experience.lengths.tolist())

    return dict(zip(experience.rows.tolist(), pieces, strict=True)), metrics.reduce(data)


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


# -- whole distributions

BETA = 0.3
VOCABULARY = 384
BANNED = (5, 300)
HINTS = ["", "a hint", "another hint of more tokens"]


def hinted() -> list[Sample]:
    """Samples whose teacher is chosen by a column, and reads another column."""
    found = samples()
    for sample in found:
        sample.prompt.columns = {
            "teacher": ("one", "two")[sample.group % 2],
            "hint": f"{HINTS[sample.group % 3]} {sample.group}",
        }
    return found


def distributions(
    folder: str, teachers: list[str], held: list[int], k: int, prompt_key: str | None
) -> tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], float, float]:
    """Return what each row's teacher says, and the loss and the gradient norm of an update."""
    made = rows.strategy()
    policy = rows.policy(made, folder, max_tokens=24)
    policy.truncation = replace(policy.truncation, banned=BANNED)
    data = made.mesh.data
    roles = [rows.policy(made, each, max_tokens=48) for each in teachers]
    for role in roles:
        role.truncation = policy.truncation

    section = AlgorithmSection(
        "distill", distill_coef=0.5, distill_top_k=k, distill_beta=BETA, length_filter=[1, 8]
    )
    columns = DataSection(teacher_key="teacher", teacher_prompt_key=prompt_key)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    make = experience_maker(
        policy,
        section,
        TrainSection(train_batch_size=8, max_tokens_per_microbatch=24),
        compare=compare_rewards(section, RewardShaper(RewardSection(), longest=10), {}),
        kl_coefficient=KLCoefficient(0.0),
        teacher=Teachers(roles, data, max_tokens=48, batching="packed"),
        teacher_columns=TeacherColumns(columns, tokenizer, ["one", "two"], longest=30),
    )
    mine = hinted()[sum(held[: data.rank]) : sum(held[: data.rank + 1])]
    plan = make(mine, Metrics())
    experience = plan.experience
    lengths = experience.lengths.tolist()
    said = zip(
        experience.candidates.split(lengths),
        experience.teacher_logprobs.split(lengths),
        strict=True,
    )
    by_row = dict(zip(experience.rows.tolist(), said, strict=True))

    (minibatch,) = plan.minibatches
    denominator = policy.denominator(experience, minibatch)
    loss, norm = policy.learn(
        [LossTerm(experience, minibatch, policy_objective(section), denominator)], Metrics()
    )
    return by_row, loss.item(), norm.item()


@pytest.mark.parametrize(
    ("held", "k", "prompt_key"),
    [([8], VOCABULARY, None), ([3, 5], 20, "hint"), ([8, 0], 20, "hint")],
    ids=str,
)
def test_what_teachers_say_about_whole_distributions(folders, held, k, prompt_key):
    """They say what plain torch computes; so are the loss, over K tokens and the rest, and the
    norm of the gradient. Over the whole vocabulary the divergence is the one of the paper.
    """
    actor = folders[0]
    others = [folders[1], actor]
    results = run_ranks(len(held), distributions, actor, others, held, k, prompt_key)
    found = {row: said for result, *_ in results for row, said in result.items()}
    student = rows.plain_model(actor).double()
    teachers = [rows.plain_model(each).double() for each in others]
    banned = torch.zeros(VOCABULARY, dtype=torch.bool)
    banned[[*BANNED]] = True

    def distribution(model, prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return (logits / rows.TEMPERATURE).masked_fill(banned, -1e30).log_softmax(-1)

    losses = []
    for row, sample in enumerate(hinted()):
        if row == LEFT_OUT:
            continue
        prompt = list(sample.prompt.token_ids)
        seen = list(sample.prompt.columns["hint"].encode()) if prompt_key else prompt
        with torch.no_grad():
            p = distribution(teachers[sample.group % 2], seen, sample.token_ids)
        q = distribution(student, prompt, sample.token_ids)

        top, ids = p.topk(min(k, VOCABULARY - len(BANNED)))
        candidates, logprobs = (each[len(prompt) :, : top.shape[1]] for each in found[row])
        torch.testing.assert_close(logprobs.double(), top, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(p.gather(1, candidates.long()), top, rtol=1e-5, atol=2e-5)
        assert not found[row][0][: len(prompt)].any()
        assert (found[row][0][len(prompt) :, top.shape[1] :] == -1).all()

        p = p.exp()
        q = q.exp()
        if k < VOCABULARY:
            p, q = (
                torch.cat([each.gather(1, ids), 1 - each.gather(1, ids).sum(1, keepdim=True)], 1)
                for each in (p, q)
            )
        else:
            p, q = (each[:, ~banned] for each in (p, q))
        middle = BETA * p + (1 - BETA) * q
        forward = (p * (p / middle).log()).sum(1)
        backward = (q * (q / middle).log()).sum(1)
        losses.append(BETA * forward + (1 - BETA) * backward)

    expected = 0.5 * torch.cat(losses).mean()
    expected.backward()
    norm = torch.stack([each.grad.norm() for each in student.parameters()]).norm()
    assert results[0][1] == pytest.approx(expected.item(), rel=1e-5)
    assert results[0][2] == pytest.approx(norm.item(), rel=1e-4)


def test_a_teacher_without_samples_is_not_asked():
    """Not even for an empty batch: no rank would compute anything."""

    class Counted:
        asked = 0

        def logprobs(self, batch, rows):
            self.asked += len(batch)
            return torch.ones(batch.num_tokens)

    batch = Experience(
        lengths=torch.tensor([2, 3]),
        input_ids=torch.arange(5),
        loss_mask=torch.ones(5, dtype=torch.bool),
        rows=torch.arange(2),
        teachers=torch.tensor([1, 1]),
    )
    first = Counted()
    second = Counted()
    teachers = Teachers([first, second], alone(), max_tokens=9, batching="packed")
    assert teachers.logprobs(batch, []).tolist() == [1] * 5
    assert (first.asked, second.asked) == (0, 2)
