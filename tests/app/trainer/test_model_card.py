"""A trained model has a card beside it, and is uploaded to the hub if the run says so; here the hub
is a server on loopback.
"""

import base64
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml

from lightrft.app.run.model_card import held_out_results, write_card
from lightrft.config import Config, resolve
from runs import prepare


class FakeHub(BaseHTTPRequestHandler):
    """Answers an upload's calls: who am I, make a repository, which files are large, commit."""

    repositories: dict[str, dict[str, bytes]] = {}
    login = True

    def do_GET(self):
        self.answer({"name": "me", "type": "user"} if self.login else None)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
            self.repositories[name] = {
                "private": str(wanted.get("private") or wanted["visibility"] == "private").encode()
            }
            self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            name = "/".join(self.path.split("/")[3:5])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.repositories[name][entry["value"]["path"]] = base64.b64decode(
                        entry["value"]["content"]
                    )
            self.answer(
                {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/1", "commitOid": "1"}
            )
        else:
            self.answer(None)

    def answer(self, content):
        text = json.dumps(content or {"error": "Unauthorized"}).encode()
        self.send_response(200 if content else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    FakeHub.repositories = {}
    FakeHub.login = True
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "HF_ENDPOINT": address,
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, value)

        monkeypatch.delenv("HTTP_PROXY", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield FakeHub
        server.shutdown()


@pytest.mark.slow
def test_a_trained_model_is_uploaded_with_its_card(tmp_path, hub):
    flags = [flag for flag in prepare(tmp_path) if not flag.startswith("--reward")]
    flags += [
        f"--eval_data={tmp_path}/train.jsonl",
        "--train_batch_size=8",
        "--max_steps=2",
        f"--save_path={tmp_path}/mine",
    ]
    command = [sys.executable, "-m", "lightrft", "train_sft", *flags, "--push_to_hub=team/tiny"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    uploaded = hub.repositories["team/tiny"]
    assert uploaded.pop("private") == b"True" and "uploaded: " in done.stderr

    assert uploaded == {
        file.name: file.read_bytes() for file in (tmp_path / "mine/model").iterdir()
    }
    card = uploaded["README.md"].decode()
    about = yaml.safe_load(card.split("---")[1])
    assert about == {
        "library_name": "transformers",
        "tags": ["lightrft", "train_sft"],
        "pipeline_tag": "text-generation",
    }
    assert (
        "# mine" in card
        and "in 2 steps" in card
        and "| loss | " in card
        and str(tmp_path) not in card
    )


PUSH = """
import sys
from pathlib import Path
from lightrft.app.run.model_card import check_hub, push
try:
    check_hub(sys.argv[1])
    push(Path(sys.argv[2]), sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "a/b", "--push_to_hub a/b: HF_HUB_OFFLINE is set"),
        (
            {"HF_TOKEN": "", "HOME": "/nowhere", "HF_HOME": "/nowhere"},
            "a/b",
            "--push_to_hub a/b: there is no login",
        ),
        ({}, "a/b/c", "--push_to_hub a/b/c: not the name of a repository"),
        ({"login": "no"}, "a/b", "--push_to_hub a/b: the hub does not accept the login"),
    ],
)
def test_what_forbids_an_upload_is_found_first(hub, monkeypatch, tmp_path, change, name, said):
    FakeHub.login = "login" not in change
    (tmp_path / "config.json").write_text("{}")
    environment = os.environ | {name: value for name, value in change.items() if value}
    environment = {name: value for name, value in environment.items() if change.get(name) != ""}
    command = [sys.executable, "-c", PUSH, name, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert said in done.stdout, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1 and not hub.repositories


def test_a_card_names_what_is_on_the_hub_and_no_folder_of_this_machine(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    config = Config.of(
        pretrain="Qwen/Qwen3-0.6B",
        prompt_data=f"openai/gsm8k:0.5,{tmp_path}/secret/own.jsonl:0.5",
        reward=f"{tmp_path}/my_rewards.py:brief",
        engine_type="hf",
    )
    resolve(config, "train_ppo", world_size=1)
    write_card(
        tmp_path / "run/model", config, steps=1200, results={"accuracy": 0.61}, version="0.1.0"
    )
    card = (tmp_path / "run/model/README.md").read_text()
    about = yaml.safe_load(card.split("---")[1])
    assert (about["base_model"], about["datasets"]) == ("Qwen/Qwen3-0.6B", ["openai/gsm8k"])
    assert about["tags"] == ["lightrft", "train_ppo"]

    assert (
        "# run" in card
        and "1,200 steps" in card
        and "| accuracy | 0.61 |" in card
        and "`my_rewards.py:brief`" in card
    )
    assert str(tmp_path) not in card and "secret" not in card


def test_the_numbers_of_a_card_are_those_of_the_last_evaluation():
    second = {"step": 2, "eval/loss": 2.0, "eval/accuracy": float("nan")}
    rows = [{"step": 1, "eval/loss": 3.0}, second, {"step": 3, "train/loss": 1.0}]
    assert held_out_results(rows) == {"loss": 2.0} and held_out_results([]) == {}


@pytest.mark.parametrize(
    ("card", "inherited"),
    [
        (
            "---\nlicense: apache-2.0\nbase_model: owner/base\ntags: [old]\n---\n",
            {"base_model": "owner/base", "license": "apache-2.0"},
        ),
        ("---\nlicense: [unclosed\n---\n", {}),
        ("no metadata", {}),
    ],
)
def test_a_card_keeps_the_origin_and_the_licence_of_the_base(tmp_path, card, inherited):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text(card)
    (tmp_path / "run/model").mkdir(parents=True)
    config = Config.of(pretrain=f"{tmp_path}/base", prompt_data="rows.jsonl", engine_type="hf")
    resolve(config, "train_ppo", world_size=1)
    write_card(tmp_path / "run/model", config, steps=1, results={}, version="0.1.0")
    about = yaml.safe_load((tmp_path / "run/model/README.md").read_text().split("---")[1])
    assert {
        name: about[name] for name in about.keys() - {"library_name", "tags", "pipeline_tag"}
    } == inherited
    assert about["tags"] == ["lightrft", "train_ppo"]
