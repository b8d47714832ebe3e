"""The work of the server for Tinker clients, on two ranks and without the SDK: losses, gradients,
models that take turns, and snapshots that clients sample from.
"""

import asyncio
import math
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.app.cli import read_command_line
from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.app.run.prepare import prepare_config
from lightrft.app.run.run import Run
from lightrft.app.trainer.build_roles import build_policy
from lightrft.core.engine import Request
from lightrft.engine.requests import Sampling
from lightrft.extras.tinker.losses import LOSSES
from lightrft.extras.tinker.records import Examples, RequestRefused, SamplePrompt
from lightrft.extras.tinker.worker import TinkerWorker
from lightrft.models.parallel.device import local_tensor
from lightrft.strategy import get_strategy
from ranks import run_cases, run_ranks, whole

ADAM = {
    "learning_rate": 3e-3,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip_norm": 0.0,
}
LENGTHS = (5, 9, 3, 7, 4)
"""Tokens of the data: more than two micro-batches of 16 tokens, and not alike on both ranks."""


def examples(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Examples:
    """Make data whose targets are partly not the next tokens, as prompts have them."""
    draw = torch.Generator().manual_seed(seed)
    size = sum(lengths) + len(lengths)
    starts = torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0)[:-1]
    ids = torch.randint(1, 250, (size,), generator=draw)
    targets = ids.clone()
    targets[starts + 1] = 0

    def real(scale: float, shift: float = 0.0) -> torch.Tensor:
        values = shift + scale * torch.randn(size, generator=draw)
        return values.index_fill(0, starts, 0.0)

    advantages = real(1.0)
    advantages[starts + 1] = 0
    columns = {
        "target_tokens": targets.index_fill(0, starts, 0),
        "weights": real(1.0),
        "logprobs": real(0.3, -5.5),
        "advantages": advantages,
        "sequence_ratio_mask": (advantages != 0).float(),
    }
    return Examples([length + 1 for length in lengths], ids, columns)


def of_paper(name: str, p: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss of one datum from the equations of Tinker's documentation."""
    if name == "cross_entropy":
        return -(p * row["weights"]).sum()
    a = row["advantages"]
    ratio = (p - row["logprobs"]).exp()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
    if name == "cispo":
        return -(ratio.clamp(0.8, 1.2).detach() * p * a).sum()
    if name == "dro":
        return -(p * a - 0.025 * (p - row["logprobs"]).square()[a != 0].sum() / len(p)).sum()
    marked = row["sequence_ratio_mask"] != 0
    mean = (p.detach() - row["logprobs"])[marked].mean()
    ratio = torch.exp(mean + p - p.detach())
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()


def plain_gradients(
    folder: str, name: str, data: Examples, dtype: torch.dtype = torch.float32
) -> tuple[float, dict, list]:
    """Return the loss, the gradients and the log-probs of plain transformers, datum by datum."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    total = torch.zeros(())
    logprobs = []
    for index in range(len(data.lengths)):
        start = sum(data.lengths[:index])
        targets = slice(start + 1, start + data.lengths[index])
        inputs = data.input_ids[start : targets.stop - 1]
        table = model(inputs[None]).logits[0].log_softmax(-1)
        row = {key: column[targets] for key, column in data.columns.items()}
        p = table.gather(1, row["target_tokens"][:, None])[:, 0]
        total = total + of_paper(name, p, row)
        logprobs.append(p.detach())
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters()}, logprobs


def largest_difference(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - grad).abs().max()) for name, grad in exact.items())


def worker_of(folder: str, save_path: str, *flags: str, engine: bool = False) -> TinkerWorker:
    argv = [
        f"--pretrain={folder}/model",
        f"--save_path={save_path}",
        "--engine_type=hf",
        "--max_tokens_per_microbatch=16",
        "--prompt_max_len=32",
        "--generate_max_len=32",
        "--bf16=false",
        *flags,
    ]
    config = prepare_config("tinker", read_command_line(argv, "tinker"))
    strategy = get_strategy(config)
    strategy.setup_distributed()
    policy = build_policy(Run(config, strategy), updates=1, reference=False)
    if engine:
        strategy.setup_inference_engine(config, actor=policy.actor)
    identity = {"settings": {"lora_rank": config.model.lora_rank}, "weights": {}}
    worker = TinkerWorker(policy, config.train, Path(save_path), identity=identity, num_snapshots=2)
    worker.create("a", [])
    return worker


def step(worker: TinkerWorker, name: str, data: Examples) -> float:
    outputs = worker.forward_backward(name, data, "cross_entropy", {}, learn=True)
    worker.optim_step(name, ADAM)
    return outputs.loss


def greedy(worker: TinkerWorker, key: object, *, scored: bool = False) -> list[list[int]]:
    prompts = [
        SamplePrompt(
            number,
            Request([5, number], sampling=Sampling(max_tokens=6, temperature=0.0), seeds=(0,)),
            key,
            scored,
        )
        for number in range(3)
    ]
    found = dict(worker.sample(prompts, lambda key: []))
    assert all(math.isnan(each.prompt_logprobs[0]) for each in found.values() if scored)
    return [found[number].completions[0].token_ids for number in range(3)]


# -- on the ranks


def gradients(folder: str, *flags: str) -> dict[str, tuple]:
    """Return the loss, the gradients and the log-probs of each loss, and add up those of the last."""
    worker = worker_of(folder, f"{folder}/run", *flags)
    names = [
        name for name, described in worker.policy.actor.hf_parameters() if described.requires_grad
    ]
    found = {}
    model = worker.models.models["a"]

    def sums() -> dict[str, torch.Tensor]:
        return dict(zip(names, map(whole, model.gradients), strict=True))

    for loss, described in LOSSES.items():
        arguments = "a", examples(), loss, dict(described.config)
        outputs = worker.forward_backward(*arguments, learn=True)
        found[loss] = outputs.loss, sums(), outputs.logprobs
        model.gradients = [None] * len(model.gradients)

    # the gradients of two requests add up, and one between them has none
    worker.forward_backward(*arguments, learn=True)
    again = worker.forward_backward(*arguments, learn=False)
    assert all(
        torch.allclose(*pair, atol=1e-6)
        for pair in zip(outputs.logprobs, again.logprobs, strict=True)
    )
    assert outputs.loss == pytest.approx(again.loss, rel=1e-5)
    worker.forward_backward(*arguments, learn=True)
    once = found[loss][1]
    for name, total in sums().items():
        torch.testing.assert_close(total, 2 * once[name], rtol=1e-6, atol=1e-8)
    worker.strategy.close()
    return found


def turns(folder: str, adapters: bool) -> dict[str, list]:
    """Let four models take turns, and each run alone; return the losses of both."""
    flags = ["--lora_rank=4"] if adapters else []
    worker = worker_of(folder, f"{folder}/turns{adapters}", *flags)
    names = ["a", "b", "c", "d"]
    for name in names[1:]:
        worker.create(name, [])
    together = {name: [] for name in names}
    for _ in range(3):
        for seed, name in enumerate(names):
            together[name].append(step(worker, name, examples(seed)))

    alone = {}
    for seed, name in enumerate(names):
        worker.create(f"{name} alone", [])
        alone[name] = [step(worker, f"{name} alone", examples(seed)) for _ in range(3)]
    worker.strategy.close()
    return {name: [together[name], alone[name]] for name in names}


def sampling(folder: str, adapters: bool) -> dict[str, object]:
    """Sample from weights before and after steps, from a checkpoint, and from --pretrain."""
    flags = ["--lora_rank=4"] if adapters else []
    worker = worker_of(folder, f"{folder}/sampling{adapters}", *flags, engine=True)
    found = {"base": greedy(worker, None, scored=True)}
    first = worker.snapshot("a")
    found["first"] = greedy(worker, first)
    for _ in range(4):
        step(worker, "a", examples())
    second = worker.snapshot("a")
    found["second"] = greedy(worker, second)
    found["first again"] = greedy(worker, first)

    worker.save("a", "a/weights/x", optimizer=True)
    worker.save("a", "a/sampler_weights/x", optimizer=False)
    found["losses"] = [step(worker, "a", examples()) for _ in range(2)]
    found["saved"] = greedy(worker, "a/sampler_weights/x")
    worker.create("b", [])
    worker.load("b", "a/weights/x", optimizer=True)
    found["resumed losses"] = [step(worker, "b", examples()) for _ in range(2)]
    worker.identity = worker.identity | {"weights": {"actor": "others"}}
    if adapters:
        with pytest.raises(RequestRefused, match="of another model"):
            worker.load("b", "a/weights/x", optimizer=True)
    with pytest.raises(RequestRefused, match="keeps the newest 2"):
        greedy(worker, ("a", 99))
    with pytest.raises(RequestRefused, match="no gradients"):
        worker.optim_step("b", ADAM)
    worker.strategy.close()
    return found


HARMFUL = {
    "finite parameters": {"learning_rate": 1e16},
    "parameters whose squares overflow": {"learning_rate": 1e30},
    "a decay that overflows": {"learning_rate": 1e10, "weight_decay": 1e10},
    "a division by zero": {"eps": 0.0, "beta1": 0.0, "beta2": 0.0},
}


def harm(folder: str, adapters: bool) -> dict[str, dict[str, str]]:
    """Break a model in several ways, use it, and another one after each; return the refusals."""
    flags = ["--lora_rank=4"] if adapters else []
    worker = worker_of(folder, f"{folder}/harm{adapters}", *flags, engine=True)
    worker.create("good", [])
    step(worker, "good", examples())
    expected = greedy(worker, worker.snapshot("good"))
    worker.save("good", "good/weights/x", optimizer=True)

    found = {}
    for number, (case, adam) in enumerate(HARMFUL.items()):
        name = f"bad{number}"
        worker.create(name, [])
        worker.forward_backward(name, examples(), "cross_entropy", {}, learn=True)
        uses = {
            "step": lambda name=name, adam=adam: worker.optim_step(name, ADAM | adam),
            "sample": lambda name=name: greedy(worker, worker.snapshot(name)),
            "save": lambda name=name: worker.save(name, f"{name}/weights/x", optimizer=True),
            "learn": lambda name=name: step(worker, name, examples()),
        }
        found[case] = {}
        for use, does in uses.items():
            try:
                does()
            except RequestRefused as error:
                found[case][use] = str(error)
            assert greedy(worker, worker.snapshot("good")) == expected
        worker.load(name, "good/weights/x", optimizer=True)
        assert greedy(worker, worker.snapshot(name)) == expected

    # Of weights that were broken before, by another server or on disk.
    worker.create("broken", [])
    broken = worker.models.take("broken")
    with torch.no_grad():
        for parameter in worker.models.trained:
            local_tensor(parameter).fill_(math.inf)
    worker.save("broken", "broken/weights/x", optimizer=True)
    broken.version += 1
    with pytest.raises(RequestRefused, match="too large or no numbers"):
        greedy(worker, "broken/weights/x")
    with pytest.raises(RequestRefused, match="a forward pass of these weights overflows"):
        greedy(worker, worker.snapshot("broken"))
    worker._check_finite = lambda token_ids: None  # as if a later token were the first to overflow
    with pytest.raises(RequestRefused, match="log-prob that is not finite"):
        greedy(worker, worker.snapshot("broken"))
    with pytest.raises(RequestRefused, match="since the load of broken/weights/x"):
        worker.load("good", "broken/weights/x", optimizer=True)
    worker.load("good", "good/weights/x", optimizer=True)
    assert greedy(worker, worker.snapshot("good")) == expected
    worker.strategy.close()
    return found


# -- tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    tiny_qwen3(folder / "model", seed=0)
    return str(folder)


@pytest.mark.slow
def test_gradients_are_those_of_plain_torch_in_every_layout(folder):
    flags = ("--fsdp", "--tp_size=2", "--sp_size=2", "--dp_replicate=2")
    layouts = run_cases(2, gradients, {flag: (folder, flag) for flag in flags})
    for name in LOSSES:
        loss, grads, logprobs = plain_gradients(f"{folder}/model", name, examples())
        _, exact, _ = plain_gradients(f"{folder}/model", name, examples(), torch.float64)
        # Plain torch in float32 errs by this much, and another order of sums by about as much.
        rounding = largest_difference(grads, exact)
        for ranks in layouts.values():
            for found in ranks:
                assert found[name][0] == pytest.approx(loss, rel=1e-5), name
                for mine, theirs in zip(found[name][2], logprobs, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
            assert ranks[0][name][1].keys() == exact.keys()
            assert largest_difference(ranks[0][name][1], exact) <= 2 * rounding, name


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False])
def test_four_models_take_turns_as_if_alone(folder, adapters):
    for together, alone in run_ranks(2, partial(turns, folder, adapters))[0].values():
        assert together == pytest.approx(alone, rel=1e-6)
        assert together[-1] != together[0]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False])
def test_clients_sample_from_the_weights_that_they_saved(folder, adapters):
    found = run_ranks(2, partial(sampling, folder, adapters))[0]
    assert found["first"] == found["base"] == found["first again"]
    assert found["second"] == found["saved"] != found["first"]
    assert found["resumed losses"] == pytest.approx(found["losses"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False])
def test_a_model_that_overflows_is_refused_alone(folder, adapters):
    """Why: the next sample ended the server, and the models of all other clients were lost."""
    found = run_ranks(2, partial(harm, folder, adapters))[0]
    finite = found.pop("finite parameters")
    assert "step" not in finite and "forward pass of these weights overflows" in finite["sample"]
    for case, refusals in found.items():
        assert list(refusals) == ["step", "sample", "save", "learn"], case
        assert len(set(refusals.values())) == 1 and "too large" in refusals["step"]


def test_old_results_cost_a_new_request_nothing(monkeypatch):
    """Why: each request looked at all results of the last quarter of an hour."""
    promises = pytest.importorskip("lightrft.extras.tinker.promises")
    kept = promises.Promises()
    done = Future()
    done.set_result({})

    def add(first: int, count: int) -> float:
        began = time.process_time()
        for number in range(first, first + count):
            kept.add(str(number), lambda: done, dict)
        return time.process_time() - began

    add(0, 20_000)
    assert add(20_000, 1000) < 1.0
    assert asyncio.run(kept.answer("0")).status_code == 200
    monkeypatch.setattr(promises, "KEPT_SECONDS", 0.0)
    time.sleep(0.01)
    add(21_000, 1)
    assert asyncio.run(kept.answer("0")).status_code == 410
    assert asyncio.run(kept.answer("21000")).status_code == 200


def test_every_loss_reads_what_the_sdk_sends():
    known = {"weights", "advantages", "logprobs", "sequence_ratio_mask"}
    assert {column for each in LOSSES.values() for column in each.columns} == known
