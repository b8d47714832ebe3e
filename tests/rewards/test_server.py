"""lightrft serve_reward: a server's rewards equal the scores of transformers."""

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from algorithms.roles import rows
from lightrft.config import RewardSection
from lightrft.core.samples import Prompt, Sample
from lightrft.rewards.runner import RewardRunner
from tiny import EOS, tiny_model
from warm import warm_python

MALFORMED = [
    b"Content-Length: -5\r\n\r\n",
    b"Content-Length: 1e9\r\n\r\n",
    b"\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Content-Length: 2\r\n\r\n\xff\xff",
    b"Content-Length: 19\r\n\r\n" + rb'{"query":["\ud800"]}',
    b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000,
    b"Content-Length: 100011\r\n\r\n" + b'{"query":["' + b"a" * 99_998 + b'"]',
    b"Content-Length: 100013\r\n\r\n" + b'{"query":["' + b"a" * 99_999 + b'"]}',
]
"""Rest of a request that is answered with the status 400."""
TEXTS = [("2+2=", "4"), ("2+2=", "five\n\n!"), ("Say hello.", ""), ("a", "b" * 70)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = [rows.dense_scorer(folder, seed) for seed in (1, 2)]
    for each in made:
        tokenizer.save_pretrained(each)
    return made


@contextmanager
def server(world_size: int, *flags: str, key: str = "") -> Iterator[tuple[str, subprocess.Popen]]:
    """Yield the address and the process of a server."""
    launcher = (
        ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--standalone"]
        if world_size > 1
        else []
    )
    command = [warm_python(), *launcher, "-m", "lightrft", "serve_reward", "--port=0", *flags]
    environment = os.environ | {"REWARD_API_KEY": key, "PYTHONPATH": str(Path(__file__).parents[2])}

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if "serving" in line:
                yield line.rstrip().rpartition(" at ")[2], process
                return
        raise AssertionError("".join(said))
    finally:
        process.kill()
        process.communicate()


def whole(prompt: str, response: str) -> torch.Tensor:
    return torch.tensor([*prompt.encode(), *response.encode(), EOS])


def post(address: str, content: object) -> tuple[int, dict]:
    request = urllib.request.Request(address, json.dumps(content).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_several_models_on_two_ranks_answer_a_run(folders, monkeypatch):
    flags = ["--fsdp", "--step_rewards=sum", "--reward_pretrain", f"good={folders[0]}:0.5"]
    with server(2, *flags, f"--process_reward_pretrain=steps={folders[1]}", key="me:secret") as (
        address,
        process,
    ):
        monkeypatch.setenv("REWARD_API_KEY", "me:secret")
        samples = [
            Sample(Prompt(0, prompt, [1], {}), 0, [1], [0.0], response, "stop")
            for prompt, response in TEXTS
        ]
        RewardRunner(address, section=RewardSection(reward_workers=0))(samples)

        outcome, process_model = (rows.plain_scorer(folder) for folder in folders)
        for sample, (prompt, response) in zip(samples, TEXTS, strict=True):
            with torch.no_grad():
                good = 0.5 * rows.plain_scores(outcome, whole(prompt, response))[-1]
                steps = rows.plain_scores(process_model, whole(prompt, response))[
                    len(prompt) :
                ].sigmoid()
            ends = [5, 7] if "\n\n" in response else [len(response)]
            expected = {"good": float(good), "steps": float(steps[ends].sum())}
            assert sample.reward_components == pytest.approx(expected, abs=1e-4)

        assert post(address, {"query": ["x"]})[0] == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0


@pytest.mark.slow
def test_bad_requests_are_answered_and_the_server_goes_on(folders):
    with server(
        1, "--fsdp", "--max_tokens_per_microbatch=200", "--reward_pretrain", folders[0]
    ) as (address, process):
        assert json.load(urllib.request.urlopen(address))["status"] == "ready"
        status, answer = post(address, {"query": ["ab", "a" * 300]})
        assert (
            status == 400
            and "a text has 301 tokens, more than --max_tokens_per_microbatch 200"
            in answer["error"]
        )

        for content in (
            [],
            {"prompts": ["a"]},
            {"prompts": ["a"], "responses": []},
            {"query": [1]},
        ):
            status, answer = post(address, content)
            assert status == 400 and "the request" in answer["error"]

        host_and_port = address.removeprefix("http://").split(":")
        head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        for sent in MALFORMED:
            answer = b""
            with socket.create_connection(host_and_port, timeout=30) as client:
                client.sendall(head + sent)
                while chunk := client.recv(1 << 16):
                    answer += chunk
            assert answer.startswith(b"HTTP/1.1 400 "), (sent[:50], answer)

        with socket.create_connection(host_and_port, timeout=30) as client:
            client.sendall(head + b"Content-Length: 50\r\n\r\n{")  # and then it leaves

        assert post(address, {"query": []}) == (200, {"rewards": []})
        plain = post(address, {"query": ["ab"]})
        assert post(address, {"query": ["ab"], "prompts": ["a"], "labels": [None]}) == plain
        with torch.no_grad():
            score = float(rows.plain_scores(rows.plain_scorer(folders[0]), whole("ab", ""))[-1])
        assert post(address, {"query": ["ab"]})[1]["rewards"] == [pytest.approx(score, abs=1e-4)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
