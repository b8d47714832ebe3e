"""Why: a loop that was written for Tinker runs here unchanged, on one's own devices.

The loops are those of tinker-cookbook, with data that need no hub. The servers have two ranks.
"""

import json
import os
import re
import signal
import subprocess
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

chz = pytest.importorskip("chz", reason="the SDK of Tinker is in .venv-tinker")
import datasets  # noqa: E402
import tinker  # noqa: E402
import torch  # noqa: E402
from tinker import types  # noqa: E402
from tinker.types.optimizer import OptimParamsBase  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from lightrft.app.quickstart.inputs import tiny_qwen3  # noqa: E402
from lightrft.app.run.prepare import unprotected_server  # noqa: E402
from lightrft.config.sections import Config, ServerSection  # noqa: E402
from lightrft.strategy.checkpoint.final_model import export_checkpoint  # noqa: E402
from warm import warm_environment, warm_programs  # noqa: E402

pytestmark = pytest.mark.slow
MODEL = "Qwen/Qwen3-8B"
"""Name that the cookbook knows; here it is a folder with a tiny model of that family."""
KEY = "tml-secret"
RANK = 4
SENTENCE = [7, 8, 9, 10, 11]


class Server(NamedTuple):
    """A running server of two ranks."""

    url: str
    process: subprocess.Popen
    log: Path

    def kill(self) -> None:
        """End all of its processes at once, as a lost machine does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(folder: Path, name: str, *flags: str) -> Server:
    command = [f"{warm_programs()}/torchrun", "--nproc_per_node=2", "-m", "lightrft", "tinker"]
    command += [f"--pretrain={MODEL}", "--engine_type=hf", "--port=0", "--bf16=false", *flags]
    command += [f"--save_path={folder}/{name}", "--prompt_max_len=600", "--generate_max_len=400"]
    log = folder / f"{name}.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=written,
            stderr=written,
            env=warm_environment(MODEL_API_KEY=KEY),
            start_new_session=True,
        )

    until = time.monotonic() + 120
    while "serving Qwen3-8B at " not in (text := log.read_text()):
        assert time.monotonic() < until and process.poll() is None, text
        time.sleep(0.1)
    return Server(text.rpartition("serving Qwen3-8B at ")[2].split()[0], process, log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the model, and stay in the folder that has it under the name that the cookbook knows."""
    folder = tmp_path_factory.mktemp("cookbook")
    words = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tiny_qwen3(folder / MODEL, seed=0, words=words)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TINKER_API_KEY", KEY)
        yield folder


@pytest.fixture(scope="module")
def adapters(folder):
    server = start(folder, "adapters", f"--lora_rank={RANK}")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def full(folder):
    server = start(folder, "full")
    yield server
    assert "Traceback" not in server.log.read_text()
    server.process.send_signal(signal.SIGINT)
    server.process.wait(60)
    assert "interrupted by SIGINT" in server.log.read_text()


@pytest.fixture
def client(adapters):
    service = tinker.ServiceClient(base_url=adapters.url)
    yield service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
    service.close("success").result()  # makes room for the models of other tests


def datum(tokens: list[int], **columns: list[float]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], **columns}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def steps(log: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if "time" not in name} for row in rows]


# -- the loops of the cookbook


def test_sl_loop_continues_after_server_and_client_were_killed(folder, adapters, monkeypatch):
    from tinker_cookbook.recipes import sl_loop

    rows = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    data = datasets.DatasetDict(train=datasets.Dataset.from_list([{"messages": rows}] * 16))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: data)
    convert = sl_loop.conversation_to_datum
    converted = []

    def convert_until_killed(*args):
        converted.append(args)
        if len(converted) == 15:
            raise KeyboardInterrupt
        return convert(*args)

    def run(server: Server, log: str) -> list[dict[str, float]]:
        options = {"learning_rate": 3e-3, "batch_size": 4, "save_every": 2, "max_length": 500}
        config = sl_loop.Config(
            base_url=server.url, log_path=log, model_name=MODEL, lora_rank=RANK, **options
        )
        sl_loop.main(config)
        return steps(Path(log))

    whole = run(adapters, "whole")
    assert whole[-1]["train_mean_nll"] < whole[0]["train_mean_nll"] - 0.5

    before = start(folder, "killed", f"--lora_rank={RANK}")
    monkeypatch.setattr(sl_loop, "conversation_to_datum", convert_until_killed)
    with pytest.raises(KeyboardInterrupt):
        run(before, "stopped")
    before.kill()

    after = start(folder, "killed", f"--lora_rank={RANK}")
    monkeypatch.setattr(sl_loop, "conversation_to_datum", convert)
    resumed = run(after, "stopped")
    after.kill()
    assert [row["step"] for row in resumed] == [0, 1, 2, 2, 3]
    for row in resumed:
        assert row == pytest.approx(whole[row["step"]], rel=1e-5)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "gspo"])
def test_rl_loop_learns_from_a_reward(folder, adapters, full, monkeypatch, loss_fn):
    """One loss trains an adapter, the other the whole model."""
    from tinker_cookbook.recipes import rl_loop

    questions = [
        {"question": f"{number}+1=", "answer": f"#### {number + 1}"} for number in range(12)
    ]
    data = datasets.DatasetDict(train=datasets.Dataset.from_list(questions))
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: data)
    # A random model never boxes a number, so it is rewarded for letters.
    monkeypatch.setattr(
        rl_loop, "get_reward", lambda text, _: sum(map(str.isascii, text)) / max(len(text), 1)
    )
    server = adapters if loss_fn == "gspo" else full
    config = rl_loop.Config(
        base_url=server.url,
        log_path=f"rl-{loss_fn}",
        model_name=MODEL,
        lora_rank=RANK,
        batch_size=2,
        group_size=32,
        learning_rate=1e-2 if loss_fn == "gspo" else 3e-3,
        max_tokens=8,
        save_every=2,
        loss_fn=loss_fn,
    )
    rl_loop.main(config)
    rewards = [row["reward/total"] for row in steps(Path(f"rl-{loss_fn}"))]
    assert len(rewards) == 6 and sum(rewards[-2:]) > sum(rewards[:2]) + 0.1, rewards


# -- the SDK


def test_a_custom_loss_is_what_the_server_would_compute(client):
    data = [datum(SENTENCE, weights=[0.0, 1.0, 2.0, 1.0]), datum(SENTENCE[::-1], weights=[1.0] * 4)]

    def loss(data, logprobs):
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
        pairs = zip(weights, logprobs, strict=True)
        return -sum((weight * row).sum() for weight, row in pairs), {}

    standing = types.AdamParams(learning_rate=0.0)
    built_in = client.forward_backward(data, "cross_entropy").result()
    one = client.optim_step(standing).result()
    custom = client.forward_backward_custom(data, loss).result()
    other = client.optim_step(standing).result()
    assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
    assert other.metrics == pytest.approx(one.metrics, rel=1e-5)

    sampler = client.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result()
    assert scores[0] is None
    assert scores[1:] == pytest.approx(built_in.loss_fn_outputs[0]["logprobs"].tolist(), abs=1e-4)


def test_samples_depend_on_their_seeds(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(SENTENCE)

    def draw(**params):
        wanted = types.SamplingParams(max_tokens=8, **params)
        sequences = sampler.sample(prompt, 3, wanted).result().sequences
        assert all(len(each.tokens) == len(each.logprobs) for each in sequences)
        return [list(each.tokens) for each in sequences]

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw() != draw()
    assert len(set(map(tuple, draw(temperature=0.0)))) == 1
    first = draw(seed=1)[0]
    assert draw(seed=1, stop=[first[2]])[0] == first[: first.index(first[2]) + 1]


def test_checkpoints_are_listed_loaded_and_deleted(adapters, client):
    data = [datum(SENTENCE, weights=[1.0] * 4)]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("one").result().path
    sampled = client.save_weights_for_sampler("one").result().path
    trained = client.forward(data, "cross_entropy").result().metrics["loss:sum"]

    service = tinker.ServiceClient(base_url=adapters.url)
    again = service.create_training_client_from_state(path).result()
    assert again.forward(data, "cross_entropy").result().metrics["loss:sum"] == trained
    assert again.get_info().lora_rank == RANK

    rest = tinker.RestClient(base_url=adapters.url)
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, RANK)
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [each.tinker_path for each in listed] == [path, sampled]
    assert client.model_id in {
        run.training_run_id for run in rest.list_training_runs().result().training_runs
    }

    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    prompt = types.ModelInput.from_ints(SENTENCE)
    from_file = service.create_sampling_client(model_path=sampled).result()
    live = client.save_weights_and_get_sampling_client().result()
    answers = [each.sample(prompt, 1, greedy).result() for each in (from_file, live)]
    assert len({tuple(each.sequences[0].tokens) for each in answers}) == 1

    saved = Path("adapters/checkpoints") / client.model_id.replace(":", "_") / "weights" / "one"
    export_checkpoint(saved, Path("exported"))
    exported = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    loss = exported(torch.tensor([SENTENCE]), labels=torch.tensor([SENTENCE])).loss
    assert 4 * float(loss) == pytest.approx(trained, rel=1e-4)

    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        service.create_training_client_from_state(path).result()


def test_moments_come_with_the_state_of_the_optimizer_and_begin_anew_without(adapters, client):
    """A step depends on the moments. After a load it is that of a client with the same ones."""
    data = [datum(SENTENCE[::-1], weights=[1.0] * 4)]

    def learned(model: tinker.TrainingClient) -> float:
        """Return the loss after one step more, and leave the model changed."""
        model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return model.forward(data, "cross_entropy").result().metrics["loss:sum"]

    for _ in range(2):
        client.forward_backward([datum(SENTENCE, weights=[1.0] * 4)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("moments").result().path
    service = tinker.ServiceClient(base_url=adapters.url)

    goes_on = learned(client)
    restored = service.create_training_client_from_state_with_optimizer(path).result()
    assert learned(restored) == goes_on
    new = service.create_training_client_from_state(path).result()
    anew = learned(new)
    assert anew != goes_on

    with warnings.catch_warnings(action="ignore"):  # the client advises new clients in place of it
        client.load_state(path).result()
    assert learned(client) == anew


def test_adamw_may_be_named(client):
    client.forward_backward([datum(SENTENCE, weights=[1.0] * 4)], "cross_entropy").result()
    named = OptimParamsBase(type="adamw", learning_rate=1e-3, beta2=0.9)
    assert client.optim_step(named).result().metrics["optim/grad_norm"] > 0
    with pytest.raises(tinker.UnprocessableEntityError, match="momentum"):
        client.optim_step(OptimParamsBase(type="adamw", momentum=1e-3)).result()


BROKEN = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"model_id": [], "base_model": "", "lora_rank": 4}',
    "\udc80",
]


def test_a_broken_file_blocks_no_listing(folder, adapters, client):
    """Why: one such file was a 500 for all listings."""
    client.save_state("good").result()
    listed = tinker.ServiceClient(base_url=adapters.url).create_rest_client()
    before = len(listed.list_training_runs().result().training_runs)
    for number, text in enumerate(BROKEN):
        file = folder / "adapters" / "checkpoints" / f"broken{number}" / "model.json"
        file.parent.mkdir()
        file.write_bytes(text.encode(errors="surrogateescape"))
    assert len(listed.list_training_runs().result().training_runs) == before
    found = listed.list_user_checkpoints().result().checkpoints
    assert any(each.checkpoint_id == "weights/good" for each in found)
    with pytest.raises(tinker.APIStatusError, match="model.json cannot be read"):
        listed.get_training_run("broken0").result()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "host.example"])
def test_a_server_that_others_reach_asks_for_a_key_or_warns(monkeypatch, host):
    config = Config(server=ServerSection(host=host))
    for command, key in (("tinker", "MODEL_API_KEY"), ("serve_reward", "REWARD_API_KEY")):
        monkeypatch.delenv(key, raising=False)
        assert f"set {key}" in unprotected_server(config, command)[0]
        monkeypatch.setenv(key, "x")
        assert unprotected_server(config, command) == []
    assert unprotected_server(Config(), "serve") == unprotected_server(config, "train_ppo") == []


@pytest.mark.parametrize(
    ("columns", "loss", "config", "message"),
    [
        ({"weights": [1.0] * 3}, "cross_entropy", None, r"weights has the shape \[3\]"),
        ({}, "cross_entropy", None, "lack weights"),
        ({"weights": [float("nan")] * 4}, "cross_entropy", None, "not finite"),
        ({"weights": [1.0] * 4}, "stable_reinforce", None, "Tinker's own sampler"),
        ({"weights": [1.0] * 4}, "cross_entropy", {"beta": 1.0}, "not an option"),
    ],
)
def test_a_wrong_datum_is_refused_by_its_meaning(client, columns, loss, config, message):
    with pytest.raises(tinker.UnprocessableEntityError, match=message):
        client.forward_backward([datum(SENTENCE, **columns)], loss, config).result()


def test_a_step_without_a_finite_gradient_is_skipped_and_says_so(client):
    """Why: the answer was refused, because JSON has no number for the norm."""
    never = {"logprobs": [-1e30] * 4, "advantages": [1.0] * 4}
    client.forward_backward([datum(SENTENCE, **never)], "importance_sampling").result()
    adam = types.AdamParams(learning_rate=1e-3)
    assert client.optim_step(adam).result().metrics == {"optim/skipped": 1.0}

    data = [datum(SENTENCE, weights=[1.0] * 4)]
    client.forward_backward(data, "cross_entropy").result()
    metrics = client.optim_step(adam).result().metrics
    assert metrics["optim/skipped"] == 0.0 and metrics["optim/grad_norm"] > 0


def test_what_the_server_lacks_is_refused_by_name(adapters, full, client):
    service = tinker.ServiceClient(base_url=adapters.url)

    def refused(message, begin):
        with pytest.raises((tinker.UnprocessableEntityError, tinker.NotFoundError), match=message):
            begin().result()

    create = service.create_lora_training_client
    refused("adapters have rank 4", lambda: create(base_model=MODEL, rank=8))
    refused("not 'Llama-3'", lambda: create(base_model="Llama-3", rank=RANK))
    refused("--target_modules", lambda: create(base_model=MODEL, rank=RANK, train_mlp=False))
    refused("no checkpoint", lambda: service.create_sampling_client("tinker://a/weights/b"))
    refused("is no name", lambda: service.create_sampling_client("tinker://a/weights/.."))
    refused("adamw alone", lambda: client.optim_step(types.DimuonParams(learning_rate=0.1)))
    for name in ("\u00e9" * 101, "a" * 201, "a b", ".."):
        refused("is no name|more than 200 bytes", lambda name=name: client.save_state(name))
    client.save_state("\u00e9" * 100).result()

    sampler = service.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints(SENTENCE)
    for most in (5000, 0):
        bound = types.SamplingParams(max_tokens=most)
        refused("at most the 1000", lambda bound=bound: sampler.sample(prompt, 1, bound))
    refused(
        "topk_sample",
        lambda: sampler.sample(prompt, 1, types.SamplingParams(), topk_sample_logprobs=3),
    )
    refused("num_samples", lambda: sampler.sample(prompt, 10**9, types.SamplingParams()))

    with pytest.raises(tinker.AuthenticationError, match="API key"):
        tinker.ServiceClient(
            base_url=adapters.url, api_key="tml-other"
        ).create_lora_training_client(base_model=MODEL, rank=RANK).result()


def test_the_whole_model_is_one_client_at_a_time(full):
    service = tinker.ServiceClient(base_url=full.url)
    with pytest.raises(tinker.UnprocessableEntityError, match="one model at a time"):
        for _ in range(2):
            service.create_lora_training_client(base_model=MODEL, rank=RANK).result()


def test_a_meaningless_request_harms_no_other(adapters, client):
    with httpx.Client(base_url=f"{adapters.url}/api/v1", headers={"x-api-key": KEY}) as web:
        for path in ("create_model", "forward_backward", "optim_step", "asample", "load_weights"):
            for content in (b"", b"{}", b"[" * 100_000, b"\xff\x00", b"null", b'{"model_id": 3}'):
                reply = web.post(f"/{path}", content=content)
                assert reply.status_code in (404, 422), (path, content[:20], reply.text)
                assert "detail" in reply.json()
        assert web.post("/asample", content=bytes(65 << 20)).status_code == 413
        assert web.post("/retrieve_future", json={"request_id": "x"}).status_code == 410
        assert web.get("/healthz").json() == {"status": "ok"}

    data = [datum(SENTENCE, weights=[1.0] * 4)]
    assert torch.isfinite(
        client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    ).all()


EXTREME = {
    "a learning rate": {"learning_rate": 1e30},
    "a large learning rate": {"learning_rate": 1e12},
    "a learning rate beyond float32": {"learning_rate": 1e300},
    "a division by zero": {"learning_rate": 1e-3, "eps": 0.0, "beta1": 0.0, "beta2": 0.0},
    "betas beside 1": {"learning_rate": 1e12, "beta1": 1 - 2**-53, "beta2": 1 - 2**-53},
    "a decay": {"learning_rate": 1e12, "weight_decay": 1e12},
    "an epsilon": {"learning_rate": 1e-3, "eps": 1e12},
    "a norm": {"learning_rate": 1e-3, "grad_clip_norm": 1e-300},
}


def test_extreme_numbers_harm_no_other(adapters, client):
    """Why: one client's overflow ended the server."""
    service = tinker.ServiceClient(base_url=adapters.url)
    prompt = types.ModelInput.from_ints(SENTENCE)
    greedy = types.SamplingParams(max_tokens=3, temperature=0.0)
    learns = [datum(SENTENCE, weights=[1.0] * 4)]
    client.forward_backward(learns, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    def sampled(of: tinker.TrainingClient) -> list[int]:
        sampler = of.save_weights_and_get_sampling_client().result()
        return sampler.sample(prompt, 1, greedy).result().sequences[0].tokens

    expected = sampled(client)
    refused = {case: set() for case in EXTREME}
    for case, adam in EXTREME.items():
        other = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
        uses = [
            lambda other=other: other.forward_backward(learns, "cross_entropy"),
            lambda other=other, adam=adam: other.optim_step(types.AdamParams(**adam)),
            lambda other=other: sampled(other),
            lambda other=other: other.save_state("x"),
        ]
        for index, use in enumerate(uses):
            try:
                result = use()
                result if index == 2 else result.result()
            except (tinker.UnprocessableEntityError, tinker.RequestFailedError) as error:
                assert re.search("too large or no numbers|from 0 to 1e", str(error)), error
                refused[case].add(index)
        assert sampled(client) == expected, case
    assert refused["a division by zero"] == refused["a decay"] == {1, 2, 3}
    assert refused["a learning rate beyond float32"] == {1}
    assert "never retrieved" not in adapters.log.read_text()

    columns = {"logprobs": [0.0] * 4, "advantages": [1.0] * 4}
    for loss, option in (("ppo", "clip_low_threshold"), ("dro", "beta")):
        for value in (1e300, -1e300, 1e12, -1e12, 1e-300):
            with (
                nullcontext()
                if abs(value) < 1e13
                else pytest.raises(tinker.UnprocessableEntityError, match="up to 1e")
            ):
                client.forward_backward(
                    [datum(SENTENCE, **columns)], loss, {option: value}
                ).result()
    columns = {"logprobs": [3e38] * 4, "advantages": [-3e38] * 4}
    client.forward_backward([datum(SENTENCE, **columns)], "dro").result()
    assert client.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["optim/skipped"]
    assert sampled(client) == expected
