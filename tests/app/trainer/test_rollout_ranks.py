"""Ranks that only generate: their samples are learned to the last bit.

The result is what ranks that do both would learn.
"""

import math
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.distributed_c10d import _get_default_store
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.trainer import sabotage
from app.trainer.in_turn import train_in_turn
from engine.contract import logits_over_one_cache, reference_logprobs
from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.run import run
from lightrft.config import parse
from lightrft.core.samples import Completion, Drafts
from lightrft.engine.base import Engine, EngineLoop, Request, Sampling
from lightrft.engine.media import Clip, Video, digest
from lightrft.engine.remote import door
from lightrft.engine.remote.server import EngineServer
from lightrft.engine.remote.weights import WeightBroadcast
from lightrft.engine.remote.wire import CODEC, Abort, Closed, Finished, Generate, LoadWeights, Peer
from lightrft.models.parallel.processes import RunProcesses
from lightrft.strategy import get_strategy
from ranks import exit_codes, run_ranks
from runs import PPO, prepare, repeatable, rows_of
from with_vllm import load_vllm

CASES = {
    "critic": [
        "--advantage_estimator=gae",
        "--eval_steps=1",
        "--eval_data={folder}/train.jsonl",
        "--max_eval_samples=5",
    ],
    "dynamic": ["--dynamic_sampling", "--first_token_temperature=2"],
    "episodes": [
        "--environment={folder}/echo.py:Echo",
        "--reward=environment",
        "--prompt_max_len=32",
        "--generate_max_len=24",
    ],
}
ECHO = """
class Echo:
    def reset(self, label, **row):
        self.turns, self.last = 0, 1 + int(label) % 3

    def step(self, action):
        self.turns += 1
        return "<" + action[:3] + ">", action.isascii() / self.last, self.turns == self.last
"""

VLLM = ["--engine_type=vllm", "--engine_kv_cache_gb=0.125", "--engine_tp_size=2"]
PROMPTS = [[40 + index] * (3 + index) for index in range(4)]


def launch() -> dist.TCPStore | None:
    """Leave the process group and set a launcher's environment.

    Runs make groups of their own in it.
    """
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if dist.get_rank() == 0
        else None
    )
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    return store


def as_launched(cases: dict[str, list[str]], save_path: str) -> None:
    """Do the runs of all cases one after another, each with process groups of its own."""
    _store = launch()
    strangers = []
    open_door = door.Door.__init__

    def open_to_strangers(self, *address):
        open_door(self, *address)
        strangers.extend(visit(self.port))

    door.Door.__init__ = open_to_strangers
    for case, flags in cases.items():
        run("train_ppo", parse([*flags, f"--save_path={save_path}/{case}"], "train_ppo"))


def both(
    folder: Path, cases: dict[str, list[str]], *, trains: int, generates: int
) -> dict[str, tuple[list, list]]:
    """Case -> the rows of metrics with and without ranks that only generate."""
    apart = {case: [*flags, f"--rollout_ranks={generates}"] for case, flags in cases.items()}
    run_ranks(trains + generates, as_launched, apart, str(folder / "apart"))
    together = train_in_turn(
        "train_ppo", trains, [(flags, folder / "together" / case) for case, flags in cases.items()]
    )
    return {
        case: (repeatable(rows_of(folder / "apart" / case)), repeatable(rows))
        for case, rows in zip(cases, together, strict=True)
    }


@pytest.mark.slow
def test_it_learns_what_ranks_that_do_both_learn(tmp_path):
    inputs = [*prepare(tmp_path), *PPO, "--max_steps=2"]
    (tmp_path / "echo.py").write_text(ECHO)
    cases = {
        case: [*inputs, *(flag.format(folder=tmp_path) for flag in flags)]
        for case, flags in CASES.items()
    }

    for apart, together in both(tmp_path, cases, trains=2, generates=1).values():
        for found, expected in zip(apart, together, strict=True):
            wanted = rounded(
                {name: value for name, value in expected.items() if "seconds" not in name},
                "engine/",
                most=1e-6,
            )
            assert {name: found[name] for name in wanted} == wanted


def rounded(row: dict[str, float], *prefixes: str, most: float) -> dict[str, float]:
    """Return the row with room for the rounding of the hf engine's log-probs.

    The rounding depends on the engine's batches, and enters some of the numbers.
    """
    return {
        name: pytest.approx(value, abs=most) if name.startswith(prefixes) else value
        for name, value in row.items()
    }


SAME = [
    "--rollout_ranks=1",
    "--rollout_correction=tis",
    "--actor_learning_rate=1e-12",
    "--generate_max_len=96",
    "--max_tokens_per_microbatch=256",
]
"""Weights that stay as they are, under new versions: trainer and engine must agree on the log-probs
of all tokens."""


@pytest.mark.slow
def test_generation_goes_ahead_of_learning(tmp_path, monkeypatch):
    """The reward rises, and samples are as old as they may be.

    A resumed run goes on learning; groups are carried and begun again. Weights that wait for the
    end of responses are loaded without another message.
    """
    monkeypatch.setattr("lightrft.engine.remote.server.WAIT_SECONDS", 1000.0)
    inputs = [*prepare(tmp_path), *PPO]
    flags = [
        *inputs,
        "--rollout_ranks=1",
        "--max_staleness=2",
        "--rollout_correction=tis",
        "--save_steps=4",
        "--actor_learning_rate=2e-2",
    ]
    over = [*inputs, *SAME, "--over_sampling=2", "--early_stop_every=1", "--max_steps=4"]
    cases = {
        "whole": [*flags, "--max_steps=12"],
        "parts": [*flags, "--max_steps=4"],
        "dynamic": [
            *flags,
            "--max_steps=4",
            "--dynamic_sampling",
            "--eval_steps=2",
            f"--eval_data={tmp_path}/train.jsonl",
        ],
        "waits": [
            *inputs,
            *SAME,
            "--max_staleness=1",
            "--max_steps=4",
            "--rollout_batch_size=2",
            "--train_batch_size=8",
        ],
        "partial": [*over, "--partial_rollout"],
        "tail": [*over, "--rollout_schedule=tail_rounds", "--max_staleness=1"],
    }
    run_ranks(3, as_launched, cases, str(tmp_path))

    run_ranks(
        3, as_launched, {"parts": [*flags, "--max_steps=6", "--load_checkpoint"]}, str(tmp_path)
    )
    rows = {case: rows_of(tmp_path / case) for case in cases}
    staleness = {case: [row["rollout/staleness"] for row in rows[case]] for case in cases}
    assert staleness["whole"] == [0.0, 1.0] + [2.0] * 10
    rewards = [row["rollout/reward"] for row in rows["whole"]]
    assert sum(rewards[-3:]) / 3 > 0.8 > 0.55 > rewards[0], rewards

    # which requests decode together depends on time: the engine rounds the same samples differently
    for found, expected in zip(
        repeatable(rows["parts"][:4]), repeatable(rows["whole"][:4]), strict=True
    ):
        assert found == rounded(expected, "engine/", "train/", most=5e-6)

    assert staleness["parts"] == [0.0, 1.0, 2.0, 2.0, 0.0, 1.0]
    assert staleness["waits"] == [0.0, 1.0, 1.0, 1.0]
    assert len(rows["dynamic"]) == 4 and "eval/reward" in rows["dynamic"][1]
    assert max(row["rollout/groups_carried"] for row in rows["partial"]) > 0
    assert max(row["rollout/groups_parked"] for row in rows["tail"]) > 0

    for case, most in (("partial", 3), ("tail", 1)):
        assert all(
            row["rollout/staleness_max"] <= most and row["engine/logprob_mismatch_max"] < 1e-5
            for row in rows[case]
        )


STRANGERS = {
    "silent": b"",
    "a byte": b"\0",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": bytes.fromhex("160301020001"),
    "another rank's answer": b"\0" * 68,
    "much": b"a" * 100_000,
    "a pickle": pickle.dumps(os.getpid) * 9,
    "multiprocessing": b"\0\0\0\x1e#CHALLENGE#" + b"a" * 20,
}


def visit(port: int) -> list[socket.socket]:
    """Open connections of strangers, and leave them open."""
    visitors = []
    for content in (*STRANGERS.values(), *[b""] * 5):
        visitors.append(socket.create_connection(("127.0.0.1", port)))
        visitors[-1].sendall(content)
    return visitors


def test_strangers_keep_no_rank_waiting(monkeypatch):
    monkeypatch.setattr(door, "MOST_UNAUTHENTICATED", 8)
    monkeypatch.setattr(door, "GREETING_SECONDS", 1.0)
    opened = door.Door("127.0.0.1", "secret")
    strangers = visit(opened.port)
    with pytest.raises(ConnectionError):
        door._enter("127.0.0.1", opened.port, b"another secret", 5)
    found = []
    began = time.monotonic()

    ranks = [
        threading.Thread(
            target=lambda rank=rank: found.append(
                door.enter("127.0.0.1", opened.port, "secret", rank)
            )
        )
        for rank in range(3)
    ]
    for each in ranks:
        each.start()
    connections = opened.admit(3)
    for each in ranks:
        each.join()
    assert sorted(connections) == [0, 1, 2] and time.monotonic() - began < 20
    inbox: SimpleQueue = SimpleQueue()
    Peer(1, connections[1], inbox)
    by_port = {each.getsockname()[1]: each for each in found}
    Peer(0, by_port[connections[1].getpeername()[1]], SimpleQueue()).send(Abort(7))
    assert inbox.get(timeout=10)[1] == Abort(7)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", opened.port))
    for each in (*found, *connections.values(), *strangers):
        each.close()


def test_a_rank_does_not_believe_a_stranger():
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer():
            connection, _ = stranger.accept()
            connection.sendall(b"a" * 32)
            connection.sendall(connection.recv(68)[-32:])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="another program answers"):
            door._enter("127.0.0.1", stranger.getsockname()[1], b"secret", 0)
        thread.join()


def test_a_rank_listens_where_the_others_are(monkeypatch):
    alone = RunProcesses(None, 1, 2, timedelta(), 1, ranks_per_node=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as vLLM leaves it on a CPU
    assert door.local_address(alone) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    address = door.local_address(replace(alone, ranks_per_node=1))
    assert not address.startswith("127.")
    door.Door(address, "secret").close()


MESSAGES = [
    Generate(-3, [], 5),
    Abort(4),
    LoadWeights(2, 3),
    Closed(),
    Generate(
        1,
        [
            (
                0,
                Request(
                    [1, 2], {}, Sampling(stop=("a", "\ud800"), banned_token_ids=(5,)), (2**62, 7), 3
                ),
            )
        ],
        0,
    ),
    Finished(
        2,
        1,
        [
            Completion([1, 2], [-0.1, -math.inf], "stop", 3, Drafts(1, 2, 3), [4, 4]),
            Completion([], [], "abort"),
        ],
    ),
]


def sent(*messages):
    """The messages after they have gone over a socket."""
    near, far = socket.socketpair()
    inbox: SimpleQueue = SimpleQueue()
    peers = Peer(0, near, SimpleQueue()), Peer(1, far, inbox)
    for message in messages:
        peers[0].send(message)
    found = [inbox.get(timeout=10)[1] for _ in messages]
    near.close()
    far.close()
    return found


def test_messages_arrive_as_they_were_sent():
    assert sent(*MESSAGES[:3], *MESSAGES[4:], MESSAGES[3]) == [
        *MESSAGES[:3],
        *MESSAGES[4:],
        MESSAGES[3],
    ]
    frames = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    waveform = np.linspace(-1, 1, 7, dtype=np.float32)
    image = Image.fromarray(frames[0])
    media = {"images": [image], "videos": [Video(frames, 3.0)], "audios": [Clip(waveform, 8000)]}
    (found,) = sent(Generate(1, [(0, Request([1], media))], 0))
    ((_, request),) = found.requests
    assert digest(request) == digest(Request([1], media))
    with pytest.raises(TypeError, match="a function cannot be sent"):
        sent(Abort(visit))


def test_the_end_of_a_connection_is_reported_once():
    """A rank may announce the end before the process ends; both count as one.

    An engine counts the ends.
    """
    for announced in (True, False):
        near, far = socket.socketpair()
        inbox: SimpleQueue = SimpleQueue()
        peer = Peer(3, near, inbox)
        for message in [Abort(1)] + [Closed()] * announced:
            far.sendall(b"".join(CODEC.dump(message)))
        far.close()
        peer._thread.join(timeout=30)
        assert [inbox.get_nowait() for _ in range(inbox.qsize())] == [
            (peer, Abort(1)),
            (peer, Closed()),
        ]


def broadcast_of(rollout_ranks: int, ranks_per_node: int) -> tuple[RunProcesses, WeightBroadcast]:
    processes = RunProcesses(
        _get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
        timedelta(seconds=60),
        rollout_ranks,
        ranks_per_node,
    )
    return processes, WeightBroadcast(processes, torch.device("cpu"), bucket_bytes=4096)


def weights_of_several_types() -> list[tuple[str, torch.Tensor]]:
    """Return tensors that are larger and smaller than a bucket, and an empty one."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (3,), (), (0, 4), (31, 7), (129, 5), (1000,), (1,)]
    return [
        (str(number), torch.randn(shape, generator=generator).to(dtype))
        for number, shape in enumerate(shapes)
        for dtype in [torch.bfloat16 if number % 2 else torch.float32]
    ]


def bytes_by_sender(rollout_ranks: int, ranks_per_node: int) -> tuple[int, bool]:
    """Return the bytes of weights that this rank sends, and whether it receives all of them."""
    processes, broadcast = broadcast_of(rollout_ranks, ranks_per_node)
    sent = []
    original = broadcast._broadcast

    def counted(number, tensor):
        sent.append(tensor.nbytes)
        return original(number, tensor)

    broadcast._broadcast = counted
    expected = weights_of_several_types()
    if not processes.generates:
        broadcast.send(iter(expected))
        # The first sender also describes each bucket, with two messages.
        return sum(sent[2::3] if processes.rank == 0 else sent), False

    found = {name: tensor.clone() for name, tensor in broadcast.receive()}
    return 0, set(found) == {name for name, _ in expected} and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in expected
    )


@pytest.mark.parametrize(
    ("trains", "ranks_per_node", "senders"),
    [(4, 2, [0, 2]), (3, 1, [0, 1, 2]), (3, 2, [0, 2]), (3, 5, [0])],
)
def test_one_rank_of_each_node_sends_an_equal_share(trains, ranks_per_node, senders):
    generates = 2
    found = run_ranks(trains + generates, bytes_by_sender, generates, ranks_per_node)
    sent = [size for size, _ in found[:trains]]
    assert [rank for rank, size in enumerate(sent) if size] == senders
    # Every byte is sent once, and a bucket is cut to a byte.
    total = sum(tensor.nbytes for _, tensor in weights_of_several_types())
    assert sum(sent) == total
    assert max(sent) - min(sent[rank] for rank in senders) <= 8
    assert [complete for _, complete in found[trains:]] == [True, True]


def one_sender_fails(folder: Path) -> None:
    """Rank 1, one of two senders, ends within the stream; write which weights the others load."""
    processes, broadcast = broadcast_of(rollout_ranks=2, ranks_per_node=1)
    version = 1
    if processes.generates:
        try:
            for _ in broadcast.receive():
                pass
            version = 2
        finally:
            (folder / f"version{processes.rank}").write_text(str(version))
        return

    def until_it_fails():
        for number, each in enumerate(weights_of_several_types()):
            if processes.rank == 1 and number == 5:
                os._exit(3)
            yield each

    broadcast.send(until_it_fails())


def test_without_one_of_its_senders_no_weights_are_complete(tmp_path):
    codes = exit_codes(4, one_sender_fails, tmp_path)
    assert codes[1] == 3 and None not in codes and 0 not in codes[2:]
    assert [(tmp_path / f"version{rank}").read_text() for rank in (2, 3)] == ["1", "1"]


def while_responses_grow(
    flags: list[str],
) -> tuple[list[list[Completion]], dict[int, list[Completion]]] | None:
    """On the rank that trains, complete PROMPTS under two versions of the weights.

    Also return what another loop had sampled when it was aborted.
    """
    _store = launch()
    config = parse(flags, "train_ppo")
    if int(os.environ["RANK"]):
        return run("train_ppo", config)

    prepare_config("train_ppo", config)
    strategy = get_strategy(config)
    strategy.setup_distributed()

    engine = strategy.setup_inference_engine()
    for version, model in enumerate(two_models(config.model.pretrain), 1):
        engine.load_weights(model.named_parameters(), version)
        if version == 1:
            loop = begun_with(engine)

    completions = {}
    while loop.running:
        completions |= dict(loop.step())
    aborted = begun_with(engine).abort()
    strategy.close()

    return [completions[index] for index in range(len(PROMPTS))], aborted


def begun_with(engine: Engine) -> EngineLoop:
    """Return a loop of long requests that have at least twenty tokens each.

    A later request of twenty tokens has ended meanwhile, so they have as many.
    """
    loop = engine.open(Sampling(max_tokens=200, n=2, seed=3))
    loop.add([Request(prompt) for prompt in PROMPTS])
    engine.generate([Request([7] * 5)], Sampling(max_tokens=20))
    assert loop.running
    return loop


def two_models(folder: str) -> list[PreTrainedModel]:
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter *= 1.2
    return models


def reference(
    update: str, models: list[PreTrainedModel], prompt: list[int], sample: Completion
) -> torch.Tensor:
    """Return the log-probs of a sample [T], over one cache or over one for each version."""
    if update == "in_flight":
        versions = sample.weight_versions
        logits = logits_over_one_cache(
            dict(enumerate(models, 1)), prompt, sample.token_ids, versions
        )
        return torch.log_softmax(logits, -1)[range(len(versions)), sample.token_ids]

    expected = [reference_logprobs(model, prompt, sample.token_ids, 1.0) for model in models]
    of_second = torch.tensor(sample.weight_versions) == 2
    return torch.where(of_second, *expected[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("update", ["in_flight", "in_flight_exact"])
def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(tmp_path, update):
    """Weights come while two ranks that share an engine decode."""
    load_vllm()
    flags = [
        *prepare(tmp_path),
        *PPO,
        *VLLM,
        "--rollout_ranks=2",
        "--generate_max_len=200",
        "--max_staleness=1",
        "--max_tokens_per_microbatch=256",
        "--rollout_correction=tis",
        f"--weight_update={update}",
    ]
    completions, aborted = run_ranks(3, while_responses_grow, flags)[0]
    models = two_models(tmp_path / "model")

    assert any(
        sorted(set(sample.weight_versions)) == [1, 2]
        for samples in completions
        for sample in samples
    )
    for prompt, samples in zip(PROMPTS, completions, strict=True):
        for sample in samples:
            assert sample.finish_reason == "stop" or len(sample.token_ids) == 200
            expected = reference(update, models, prompt, sample)
            found = torch.tensor(sample.logprobs)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    ended = [sample for samples in aborted.values() for sample in samples]
    assert len(ended) == 2 * len(PROMPTS) and any(
        sample.finish_reason == "abort" for sample in ended
    )
    assert all(
        set(sample.weight_versions) == {2} and 20 <= len(sample.token_ids) < 200
        for sample in ended
        if sample.finish_reason == "abort"
    )


@pytest.mark.slow
def test_ranks_that_share_an_engine_serve_zero_3(tmp_path, monkeypatch):
    """Each rank that trains sends half of the weights, as if it were on a node of its own."""
    load_vllm()
    build = WeightBroadcast.__init__

    def build_for_nodes(broadcast, processes, *args, **options):
        build(broadcast, replace(processes, ranks_per_node=1), *args, **options)
        assert broadcast._num_senders == 2

    monkeypatch.setattr(WeightBroadcast, "__init__", build_for_nodes)
    flags = [*prepare(tmp_path), *PPO, *VLLM, "--max_steps=2", "--fsdp=false", "--zero_stage=3"]
    flags.append("--rollout_quantization=int8")
    ((apart, together),) = both(tmp_path, {"vllm": flags}, trains=2, generates=2).values()
    assert len(apart) == 2 and apart == together


def with_a_pause(advance: Callable[[EngineServer], None]) -> Callable[[EngineServer], None]:
    """Let a response of 96 tokens take a second.

    So weights arrive before the response ends, even where learning is slow.
    """

    def advance_slowly(server: EngineServer) -> None:
        if server._owners:
            time.sleep(0.02)
        advance(server)

    return advance_slowly


EIGHT_STEPS = [
    *PPO,
    *VLLM,
    *SAME,
    "--engine_tp_size=1",
    "--rollout_batch_size=2",
    "--n_samples_per_prompt=2",
    "--train_batch_size=4",
    "--max_steps=8",
]


@pytest.mark.slow
def test_responses_of_several_versions_are_learned(tmp_path, monkeypatch):
    """New weights interrupt responses, or responses are aborted and continued.

    Adapters alone arrive while responses of other adapters decode. Trainer and engine agree on the
    log-probs in any case.
    """
    load_vllm()
    monkeypatch.setattr(EngineServer, "_advance", with_a_pause(EngineServer._advance))
    flags = [*prepare(tmp_path), *EIGHT_STEPS]
    adapters = ["--weight_update=in_flight", "--lora_rank=4", "--lora_sync=adapter"]
    cases = {
        "exact": [*flags, "--max_staleness=2", "--weight_update=in_flight_exact"],
        "partial": [*flags, "--over_sampling=3", "--early_stop_every=1", "--partial_rollout"],
        "adapters": [*flags, "--max_staleness=2", *adapters],
    }
    run_ranks(3, as_launched, cases, str(tmp_path), timeout=400)
    for case, most in {"exact": 2, "partial": 5, "adapters": 2}.items():
        rows = rows_of(tmp_path / case)
        staleness = [row["rollout/staleness"] for row in rows]
        assert any(staleness) if case == "adapters" else any(mean % 1 for mean in staleness), case
        assert all(
            row["rollout/staleness_max"] <= most and row["engine/logprob_mismatch_max"] < 1e-4
            for row in rows
        ), case


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers(tmp_path):
    flags = [*prepare(tmp_path), *PPO, "--max_steps=4", "--save_steps=2", "--rollout_ranks=1"]
    cases = {"whole": flags, "parts": [*flags, "--max_steps=2"]}
    run_ranks(2, as_launched, cases, str(tmp_path))
    run_ranks(2, as_launched, {"parts": [*flags, "--load_checkpoint"]}, str(tmp_path))
    assert repeatable(rows_of(tmp_path / "parts")) == repeatable(rows_of(tmp_path / "whole"))
    model = Path("model") / "model.safetensors"
    assert (tmp_path / "parts" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def sabotaged(flags: list[str], folder: Path) -> None:
    _store = launch()
    log = open(folder / f"log{os.environ['RANK']}", "w", buffering=1)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    sabotage.main(flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "phase"), [(2, "generate"), (1, "train")], ids=["generates", "trains"]
)
def test_a_rank_that_dies_is_named_on_both_sides(tmp_path, monkeypatch, rank, phase):
    monkeypatch.setenv("SABOTAGE", f"{phase}:{rank}:kill")
    flags = [
        *prepare(tmp_path),
        *PPO,
        "--max_steps=3",
        "--rollout_ranks=1",
        f"--save_path={tmp_path}/run",
    ]
    codes = exit_codes(3, sabotaged, flags, tmp_path)
    assert codes == [-9 if each == rank else 1 for each in range(3)]

    for other in {0, 1, 2} - {rank}:
        said = (tmp_path / f"log{other}").read_text()
        assert re.search(
            rf"this run ends: rank {rank} \(pid \d+ on .*\) ended without an error message in phase"
            rf" {phase}:",
            said,
        )
        assert "Traceback" not in said
