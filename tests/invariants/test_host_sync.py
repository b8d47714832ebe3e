"""Why: a host that waits for the device between micro-batches leaves the device idle.

It should prepare the next micro-batch meanwhile. Tensors on the meta device have shapes and no
values: whatever reads a value on the host (item, tolist, nonzero, a copy to the host, a size that
depends on values) fails on them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from flat_models import make_batch, make_model
from lightrft.algorithms.means import MeanCounts, PromptTokens
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection
from lightrft.config.facts import EXPERT_FAMILIES
from lightrft.core.batch import Batch, Experience, micro_batches
from lightrft.core.losses import Denominator
from lightrft.core.metrics import Metrics
from lightrft.models.attention.flat import ATTENTION, flat_attention
from lightrft.models.attention.layout import Layout
from lightrft.models.heads import Actor, Scorer
from lightrft.models.logits.logprobs import Truncation, logprobs_of_logits, token_logprobs
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.expert_parallel import expert_layers, visit
from lightrft.models.parallel.recompute import recompute
from lightrft.models.parallel.sequence_parallel import NO_SEQUENCE_PARALLEL
from lightrft.models.routers import RouterChoices
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from models.parallel.families import family_config
from ranks import fake_group

T = 12
N = 3
H = 4
V = 20


def to_device(device: torch.device | str) -> Callable[[Batch], Batch]:
    def call(part: Batch) -> Batch:
        shared = find_shared_prefixes(part.input_ids, part.lengths, part.media)
        return replace(part, shared=shared).to(device)

    return call


def on_device(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def batch() -> Experience:
    token = on_device(T)
    sequence = on_device(N, dtype=torch.int64)
    return Experience(
        lengths=sequence,
        input_ids=on_device(T, dtype=torch.int64),
        loss_mask=on_device(T, dtype=torch.bool),
        rows=sequence,
        groups=sequence,
        rewards=on_device(N),
        advantages=token,
        engine_logprobs=token,
        old_logprobs=token,
        reference_logprobs=token,
        weights=token,
        marked=on_device(T, dtype=torch.bool),
    )


MODES = [
    *("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "prompt-mean",
]
CORRECTED = {"rollout_correction": "mis", "rollout_correction_level": "sequence"}
OBJECTIVES = [
    *({"loss_agg_mode": mode} for mode in MODES),
    *({"policy_loss": name} for name in policy_losses.names()),
    CORRECTED,
    {"off_policy_delta": 0.5},
]


@pytest.mark.parametrize("fields", OBJECTIVES, ids=str)
def test_a_micro_batch_never_waits_for_the_device(fields):
    hidden = on_device(T, H, grad=True)
    weight = on_device(V, H, grad=True)
    part = batch()
    metrics = Metrics()
    objective = policy_objective(
        AlgorithmSection(
            **fields, use_kl_loss=True, init_kl_coef=0.1, dual_clip=3.0, entropy_coef=0.1
        )
    )
    logprobs, entropy = token_logprobs(hidden, weight, part.input_ids, temperature=0.7, chunk=5)
    part.entropy = entropy
    prompts = PromptTokens(on_device(2, dtype=torch.int64), on_device(2))
    denominator = Denominator(on_device(), on_device(), mean_counts=MeanCounts(8, prompts))
    loss, report = objective(logprobs, part, denominator)
    loss.backward()
    for name, values in (report | {"train/entropy": entropy.detach()}).items():
        (metrics.max if name.endswith("_max") else metrics.mean)(name, values, part.loss_mask)
    assert hidden.grad.shape == (T, H) and weight.grad.shape == (V, H)
    assert part.position_ids.shape == part.sequence_ids.shape == (T,)


@pytest.mark.parametrize("family", ["llama", "qwen2 window", "qwen3", "gemma3"])
def test_models_never_wait(family):
    """Micro-batches are chosen on the host, where lengths and masks have values.

    Then everything happens on the device.
    """
    model = make_model(family, ATTENTION)
    actor = Actor(model.to("meta"))
    model.config.num_labels = 1
    critic = Scorer(AutoModelForSequenceClassification.from_config(model.config).to("meta"))
    for part in micro_batches(make_batch(alike=2), [[2, 0], [], [7, 1, 3]], to_device("meta")):
        assert (part.shared is not None) == (len(part) > 1)
        logprobs, entropy = actor(part, 0.7)
        (logprobs.sum() + entropy.sum() + critic(part).sum()).backward()
        assert logprobs.shape == entropy.shape == (part.num_tokens,)
    assert all(parameter.grad is not None for parameter in actor.parameters())


@pytest.mark.parametrize("window", [None, 4])
def test_attention_within_images_never_waits(window):
    """Lengths and places of images are known on the host."""
    lengths = torch.tensor([9, 3])
    in_images = torch.arange(12) % 6 > 1
    layout = Layout(lengths, torch.device("meta"), bidirectional=in_images)
    query, key, value = (on_device(1, heads, 12, 8, grad=True) for heads in (4, 2, 2))
    flat_attention(
        torch.nn.Module(), query, key, value, None, layout=layout, sliding_window=window
    )[0].sum().backward()
    assert len(layout.calls(window)) == 2 and query.grad.shape == query.shape


def family_of(name: str) -> PreTrainedModel:
    config = family_config(name, tie=False, vocabulary=261)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_replayed_and_counted_experts_never_wait(family: str) -> None:
    model = family_of(family)
    choices = RouterChoices(model)
    actor = Actor(model.to("meta", torch.bfloat16)).train()
    actor.router_choices = choices
    batch = make_batch(alike=2)
    batch.experts = choices.shape.empty(batch.num_tokens)
    for part in micro_batches(batch, [[2, 0], [7, 1, 3]], to_device("meta")):
        logprobs, _ = actor(part, 0.7)
        logprobs.sum().backward()
        assert choices.report(NO_SEQUENCE_PARALLEL)
        assert choices.load(NO_SEQUENCE_PARALLEL).is_meta


@pytest.mark.parametrize("policy", ["", "full", "selective"])
def test_divided_experts_wait_once_in_a_layer(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective has to know how many tokens each rank sends, and nothing else is read.

    What was read in the forward pass is not read again when a layer is recomputed.
    """
    batch = make_batch([T])
    sent = 2 * T
    reads: list[torch.Tensor] = []
    counts = [[sent - 5, 5], [7, 4]]
    read = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor,
        "tolist",
        lambda tensor: (reads.append(tensor) or counts) if tensor.is_meta else read(tensor),
    )
    collectives: list[str] = []
    exchange = dist.all_to_all_single
    monkeypatch.setattr(
        dist,
        "all_to_all_single",
        lambda *args, **options: collectives.append(args[0].dtype) or exchange(*args, **options),
    )
    model = family_of("qwen3_moe")
    actor = Actor(model.to("meta", torch.bfloat16)).train()
    if policy:
        recompute(actor, policy)
    with fake_group(2):
        axis = Axis("ep", 2, 0, dist.group.WORLD)
        layers = expert_layers(model)
        for experts in layers:
            experts.num_experts = 2
            for name, parameter in list(experts.named_parameters()):
                setattr(experts, name, torch.nn.Parameter(parameter.data[:2]))
            experts.forward = partial(visit, experts.forward, 2, axis)
        logprobs, _ = actor(to_device("meta")(batch), 0.7)
        logprobs.sum().backward()
    assert len(reads) == len(layers)
    assert all(parameter.grad is not None for parameter in model.parameters())
    # Numbers of tokens are exchanged once; tokens go and return in each pass.
    assert collectives.count(torch.int64) == len(layers)
    assert collectives.count(torch.bfloat16) == len(layers) * (4 if not policy else 6)


def test_truncated_log_probs_and_those_of_logits_never_wait():
    hidden = on_device(T, H, grad=True)
    logits = on_device(T, V, grad=True)
    targets = on_device(T, 2, dtype=torch.int64)
    truncation = Truncation(top_k=3, top_p=0.9, min_p=0.1)
    values = token_logprobs(hidden, on_device(V, H), targets, truncation=truncation, chunk=5)
    values += logprobs_of_logits(logits, targets, truncation=truncation, chunk=5)
    sum(value.sum() for value in values).backward()
    assert hidden.grad.shape == (T, H) and logits.grad.shape == (T, V)


def test_reading_a_value_fails():
    for read in (torch.Tensor.item, torch.Tensor.nonzero, torch.Tensor.cpu, torch.Tensor.tolist):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(on_device())


@pytest.fixture
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def forward_and_backward(family: str, recomputes: str, device: torch.device, dtype: torch.dtype):
    """Return a function that does both for some micro-batches.

    It uses a model, and a head that computes its gradient at once.
    """
    actor = Actor(make_model(family, ATTENTION).to(device, dtype)).train()
    batch = make_batch(alike=2)
    if recomputes:
        recompute(actor, recomputes)
    hidden, weight = (
        torch.zeros(rows, 16, device=device, dtype=dtype, requires_grad=True) for rows in (T, V)
    )
    targets = torch.zeros(T, dtype=torch.int64, device=device)
    ones = lambda rows, logprobs, entropy: (torch.ones_like(logprobs), None)  # noqa: E731

    def run() -> None:
        for part in micro_batches(batch, [[2, 0], [7, 1, 3]], to_device(device)):
            logprobs, entropy = actor(part, 0.7)
            (logprobs.sum() + entropy.sum()).backward()
        token_logprobs(hidden, weight, targets, chunk=5, entropy=False, upstream=ones)[
            0
        ].sum().backward()

    return run


FLASH = [
    ("llama", ""),
    ("llama", "full"),
    ("llama", "selective"),
    ("qwen2 window", ""),
    ("gemma3", ""),
    ("experts", ""),
    ("experts", "selective"),
    ("llama", "offload"),
]
"""Families with heads of eight columns, as flash attention takes them, and what is recomputed."""


@pytest.mark.parametrize(("family", "recomputes"), FLASH)
def test_forward_and_backward_run(family, recomputes):
    """In the precision of a GPU; a CPU computes experts in groups then, too."""
    forward_and_backward(family, recomputes, torch.device("cpu"), torch.bfloat16)()


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "recomputes"), FLASH)
def test_a_real_device_is_never_waited_for(family, recomputes, request):
    """CUDA raises where the host would wait.

    The first run compiles, and chooses kernels, which may wait.
    """
    run = forward_and_backward(
        family, recomputes, torch.device(torch.accelerator.current_accelerator()), torch.bfloat16
    )
    run()
    request.getfixturevalue("waiting_is_an_error")
    run()
