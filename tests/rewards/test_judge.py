"""--reward judge: scores from the replies of a language model on an OpenAI-compatible server."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from json_server import JsonHandler, listening
from lightrft.config import Config, ConfigError, RewardSection, validate
from lightrft.config.references import RewardTerm
from lightrft.core.samples import Prompt, Sample
from lightrft.rewards.engine_judge import EngineJudge
from lightrft.rewards.judge_settings import JudgeSettings, fill_template
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy import get_strategy
from ranks import run_ranks
from runs import PPO, prepare, train


class Handler(JsonHandler):
    """Replies with the texts of `replies` in turn, one for each text to judge.

    `requests` has all requests.
    """

    replies: list[str]
    requests: list[tuple[str, str | None, dict]]
    lock = threading.Lock()

    def do_POST(self) -> None:
        request = self.read_json()
        with self.lock:
            before = sum(
                other["messages"] == request["messages"] for _, _, other in type(self).requests
            )
            type(self).requests.append((self.path, self.headers["Authorization"], request))
        reply = self.replies[min(before, len(self.replies) - 1)]
        self.send_json({"choices": [{"message": {"role": "assistant", "content": reply}}]})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    Handler.replies = []
    Handler.requests = []
    with listening(Handler) as address:
        yield {"judge_url": f"{address}/v1", "judge_model": "m"}


def judged(
    server: dict,
    *replies: str,
    responses: tuple[str, ...] = ("four", "five"),
    reward: str = "judge",
    **settings,
) -> list:
    Handler.replies = list(replies)
    samples = [
        Sample(Prompt(0, "2+2?", [1], {"label": "4"}), 0, [1], [0.0], text, "stop")
        for text in responses
    ]
    RewardRunner(reward, section=RewardSection(**server | {"reward_workers": 0} | settings))(
        samples
    )
    return [sample.reward for sample in samples]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Fine.\nScore: 7", 0.7),
        ("Score: 3 at first. But no.\n**Score:** 8.5", 0.85),
        ("The score is 10/10.", None),
        ("score = 10", 1.0),
        ("Score: 0", 0.0),
        ("Score: 4\nScore: 11", 0.4),
        ("Score: -1", None),
        ("good", None),
        ("", None),
    ],
)
def test_the_last_score_within_the_range_counts(server, reply, reward):
    if reward is None:
        with pytest.raises(ConfigError, match="no score from 0 to 10 .* in 3 replies of the judge"):
            judged(server, reply)
    else:
        assert judged(server, reply) == [pytest.approx(reward)] * 2


def test_the_request_and_a_second_one_when_the_reply_has_no_score(server, tmp_path):
    (tmp_path / "template.txt").write_text('{"a": {label}} {prompt} {response} {unknown}')
    settings = {
        "judge_template": str(tmp_path / "template.txt"),
        "judge_pattern": r"<(\\d+)>".replace("\\\\", "\\"),
    }
    found = judged(
        server,
        "?",
        "<3>",
        responses=("{prompt}",),
        judge_range=[1.0, 5.0],
        judge_max_tokens=9,
        **settings,
    )
    assert found == [0.5]
    message = {"role": "user", "content": '{"a": 4} 2+2? {prompt} {unknown}'}
    common = {"model": "m", "messages": [message], "max_tokens": 9}
    expected = [
        ("/v1/chat/completions", "Bearer secret", common | {"temperature": warm})
        for warm in (0.0, 1.0)
    ]
    assert Handler.requests == expected


def test_together_with_another_reward_and_from_worker_processes(server):
    found = judged(
        server,
        "Score: 5",
        reward="judge:0.5,exact_match",
        responses=("4", "five"),
        reward_workers=1,
    )
    assert found == [1.25, 0.25]


def test_a_failed_judgement_loses_only_its_response(server):
    Handler.replies = ["none"]
    assert judged(server, "none", reward_failure="zero") == [0.0, 0.0]


def test_texts_are_inserted_once():
    assert fill_template("{a} {b} {c}", {"a": "{b}", "b": "{a}"}) == "{b} {a} {c}"
    assert fill_template("{a} {b}", {"a": 7.0, "b": ["x", {"y": None}]}) == '7 ["x", {"y": null}]'


def test_mistakes_are_named_before_the_run():
    config = Config.of(reward="judge", judge_range=[3.0, 3.0])
    with pytest.raises(ConfigError) as error:
        validate(config, command="train_ppo", world_size=1)
    for says in (
        "--reward judge needs --judge_url",
        "--reward judge needs --judge_model",
        "--judge_range takes two numbers",
    ):
        assert says in str(error.value)

    for wrong, says in (
        ({"judge_pattern": "("}, "--judge_pattern"),
        ({"judge_pattern": "x"}, "0 groups instead of one"),
        ({"judge_template": "/nowhere"}, "--judge_template /nowhere: No such file"),
    ):
        with pytest.raises(ValueError, match=says):
            RewardRunner(
                "judge",
                section=RewardSection(judge_url="http://127.0.0.1:1/v1", judge_model="m", **wrong),
            )


# -- the judge in the engine

DIGIT = {
    "judge_url": "engine",
    "judge_pattern": r"([0-9])",
    "judge_range": [0.0, 9.0],
    "judge_max_tokens": 24,
}
"""Pattern of a score: a model of random weights writes a digit now and then."""


def in_engine(folder: str) -> list[tuple[str, float, dict]]:
    """Return (prompt, reward, components) of this rank's samples.

    The first rank has one more than the second.
    """
    values = {
        "pretrain": folder,
        "engine_type": "hf",
        "prompt_max_len": 8,
        "generate_max_len": 8,
        "reward": "judge:2",
    }
    config = Config.of(**values, **DIGIT, reward_failure="zero")
    strategy = get_strategy(config)
    strategy.setup_distributed()
    strategy.setup_inference_engine()

    prompts = [Prompt(row, f"{row}?", [1], {}) for row in range(24)][
        strategy.get_rank() :: strategy.mesh.world.size
    ]
    samples = [Sample(prompt, 0, [1], [0.0], "yes", "stop") for prompt in prompts]
    runner = RewardRunner("none", section=config.reward)
    runner.judge = EngineJudge(
        RewardTerm("judge", "judge", 2.0), config, strategy, AutoTokenizer.from_pretrained(folder)
    )
    runner.ask_judge(samples[:1])
    runner(samples)

    return [(sample.prompt.text, sample.reward, sample.reward_components) for sample in samples]


@pytest.mark.slow
def test_the_engine_judges_as_transformers_generates(tmp_path):
    flags = prepare(tmp_path)
    folder = str(tmp_path / "model")
    one, two = (
        dict((text, rest) for share in run_ranks(ranks, in_engine, folder) for text, *rest in share)
        for ranks in (1, 2)
    )
    assert one == two and len(one) == 24
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compared = 0

    for text, (reward, components) in one.items():
        asked = JudgeSettings(RewardSection(**DIGIT)).text(
            Sample(Prompt(0, text, [1], {}), 0, [], [], "yes", "stop"), {}
        )
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]
        reply = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        digits = [
            each
            for each in tokenizer.decode(reply, skip_special_tokens=True)
            if each in "0123456789"
        ]

        if digits:
            compared += 1
            assert reward == pytest.approx(2 * int(digits[-1]) / 9) and components[
                "judge"
            ] == pytest.approx(reward)

    assert compared
    kept = [flag for flag in flags if not flag.startswith("--reward")]
    judge = [
        "--reward=judge",
        *(f"--{name}={value}" for name, value in DIGIT.items() if name != "judge_range"),
        "--judge_range",
        "0",
        "9",
        "--reward_failure=drop",
        "--max_steps=1",
    ]
    (row,) = train("train_ppo", 2, [*kept, *PPO, *judge], tmp_path / "run")
    scored = 1 - row["rollout/reward_failures"] / 32
    assert (
        row["rollout/reward"] == pytest.approx(scored * row["rollout/reward_of_judge"])
        and row["rollout/staleness_max"] == 0
    )
