"""Why: a loss normalised per micro-batch or per rank trains differently for every split.

Here three GRPO updates of a fixed experience are computed by a loop in plain torch, one sequence at
a time: the canonical trajectory of losses, gradient norms and parameters. It must come out the same
for every number of ranks, way of batching, size of micro-batch, with activations recomputed, and
for every chunk of the log-probs; test_factorisations.py divides the ranks into axes.
"""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.rollout.sampler import sampling_of
from lightrft.algorithms.terms import policy_objective
from lightrft.app.run.run import Run
from lightrft.app.trainer.build_roles import build_policy
from lightrft.config import Config
from lightrft.core.batch import Experience
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.models.logits import logprobs
from lightrft.models.weight_sync.stream import persistent_buffers
from lightrft.strategy import get_strategy
from ranks import run_ranks
from tiny import tiny_model

PROMPT = 3
STEPS = 5
LEARNING_RATE = 3e-4
MAX_NORM = 0.5
EPSILON = 1e-3
"""AdamW's, as large as gradients are. With one near 0 a step has each gradient's sign, and gradients
near 0 move parameters by their rounding, which differs from processor to processor."""
TEMPERATURE = 0.8
RESPONSES = [1, 9, 4, 17, 2, 6, 6, 12, 3, 5]
LONGEST = 20
DELTA = 0.9
"""Masks some of the sequences."""
TOP_K = 120
TOP_P = 0.7
"""Leaves about a hundred of 384 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def experience() -> Experience:
    """Return two responses to each prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([PROMPT + response for response in RESPONSES])
    total = int(lengths.sum())
    learned = torch.cat([torch.arange(PROMPT + response) >= PROMPT for response in RESPONSES])
    advantages = torch.randn(len(RESPONSES), generator=generator).repeat_interleave(lengths)
    # far from the actor's, so that tokens are clipped on both sides
    old = -5 + torch.randn(total, generator=generator)
    rows = torch.randint(0, 256, (total,), generator=generator).split(lengths.tolist())
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        one[:PROMPT] = other[:PROMPT]

    return Experience(
        lengths=lengths,
        input_ids=torch.cat(rows),
        loss_mask=learned,
        rows=torch.arange(len(RESPONSES)),
        groups=torch.arange(len(RESPONSES)) // 2,
        rewards=torch.zeros(len(RESPONSES)),
        advantages=torch.where(learned, advantages, 0.0),
        engine_logprobs=old,
        old_logprobs=old,
        reference_logprobs=old + 0.1,
    )


def configuration(folder: str, mode: str) -> Config:
    config = Config()
    config.model.pretrain = folder
    config.strategy.fsdp = True
    config.rollout.temperature = TEMPERATURE
    config.rollout.generate_max_len = LONGEST

    if mode == "truncated":
        config.rollout.top_k = TOP_K
        config.rollout.top_p = TOP_P
        mode = "token-mean"
    if mode == "gspo":
        config.algorithm.policy_loss = "gspo"
        mode = "seq-mean-token-mean"
    if mode == "prompt-mean":
        config.algorithm.off_policy_delta = DELTA

    config.algorithm.loss_agg_mode = mode
    config.algorithm.use_kl_loss = True
    config.algorithm.init_kl_coef = 0.1
    config.algorithm.eps_clip_high = 0.3
    config.algorithm.dual_clip = 3.0
    config.optim.learning_rate = LEARNING_RATE
    config.optim.lr_scheduler = "constant"
    config.optim.lr_warmup_ratio = 0.0
    config.optim.max_norm = MAX_NORM

    return config


@dataclass(frozen=True)
class Layout:
    """One way to compute the trajectory."""

    ranks: int = 1
    tp: int = 1
    replicas: int = 1
    sp: int = 1
    ep: int = 1
    impl: str = "ulysses"
    batching: str = "packed"
    tokens: int = 1000
    sequences: int | None = None
    # between attention and feed-forward each of the tp ranks keeps a part of the tokens
    sequence: bool = False
    checkpointing: str = ""  # policy of the recomputation
    memory: str = ""  # fsdp_cpu_offload or offload_idle
    zero: int | None = None  # DeepSpeed's stage, in place of FSDP
    chunk: int = 2**25  # logits at a time; the vocabulary has 384


SMALL_ON_FOUR = Layout(4, tokens=30, batching="dynamic", checkpointing="full")
LAYOUTS = [
    Layout(),
    Layout(sequences=1),
    Layout(sequences=2, batching="plain", checkpointing="offload"),
    Layout(tokens=40, batching="dynamic", chunk=7 * 384),
    Layout(sequences=3, checkpointing="selective", memory="offload_idle"),
    Layout(2, sequences=4, batching="plain", chunk=1),
    Layout(2, tokens=24),
    SMALL_ON_FOUR,
    Layout(4),
]

Trained = tuple[list[list[float]], dict[str, torch.Tensor]]


def build(folder: str, mode: str, layout: Layout) -> tuple[Config, Policy]:
    config = configuration(folder, mode)
    config.model.gradient_checkpointing = bool(layout.checkpointing)
    config.model.gradient_checkpointing_policy = layout.checkpointing or "full"
    config.strategy.tp_size = layout.tp
    config.strategy.dp_replicate = layout.replicas
    config.strategy.ep_size = layout.ep
    config.strategy.tp_sequence_parallel = layout.sequence
    config.strategy.sp_size = layout.sp
    config.strategy.sp_impl = layout.impl
    config.strategy.fsdp = layout.zero is None
    config.strategy.zero_stage = layout.zero or 0
    config.strategy.fsdp_cpu_offload = layout.memory == "fsdp_cpu_offload"
    config.strategy.offload_idle = layout.memory == "offload_idle"
    config.train.max_tokens_per_microbatch = layout.tokens
    config.train.batching = layout.batching
    logprobs.HOST_CHUNK = layout.chunk
    strategy = get_strategy(config)
    strategy.setup_distributed()

    policy = build_policy(
        Run(config, strategy), updates=STEPS, reference=False, sampling=sampling_of(config.rollout)
    )
    for group in policy.optimizer.param_groups:
        group["eps"] = EPSILON

    return config, policy


def updated(config: Config, policy: Policy, layout: Layout, steps: int) -> list[list[float]]:
    """Return loss and gradient norm of each update. Nobody needs the actor between two updates."""
    data = policy.strategy.mesh.data
    whole = experience()
    ends = [len(whole) * rank // data.size for rank in range(data.size + 1)]
    mine, (rows,) = policy.strategy.redistribute(
        whole.select(range(*ends[data.rank : data.rank + 2])),
        minibatch_size=None,
        **policy.limits(layout.sequences),
    )

    numbers = []
    for _ in range(steps):
        by_prompt = config.algorithm.loss_agg_mode == "prompt-mean"
        denominator = policy.denominator(mine, rows)
        if by_prompt:
            denominator = policy.with_prompts(denominator, mine, rows)
        update = policy.learn(
            [LossTerm(mine, rows, policy_objective(config.algorithm), denominator)], Metrics()
        )
        numbers.append([float(number) for number in update])
        policy.finish_training()
        away = {parameter.device.type for parameter in policy.actor.parameters()} == {"meta"}
        assert away == (layout.memory == "offload_idle")

    return numbers


def parameters_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.strategy.full_params(policy.actor)}


def trained(folder: str, mode: str, layout: Layout, steps: int = STEPS) -> Trained:
    """Return loss and gradient norm of each update, and the parameters after them."""
    config, policy = build(folder, mode, layout)
    numbers = updated(config, policy, layout, steps)
    parameters = parameters_of(policy)
    policy.strategy.close()
    return numbers, parameters


def trained_in_turn(folder: str, mode: str, layouts: list[Layout], steps: int) -> list[Trained]:
    return [trained(folder, mode, layout, steps) for layout in layouts]


def assert_all_are_plain_torch(
    folder: str, mode: str, layouts: list[Layout], steps: int = STEPS
) -> None:
    """Compare every rank with plain torch; each number of ranks is one start of processes."""
    expected_numbers, expected = plain_torch(folder, mode, steps)
    start = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    for ranks in sorted({layout.ranks for layout in layouts}):
        chosen = [layout for layout in layouts if layout.ranks == ranks]
        by_rank = run_ranks(ranks, trained_in_turn, folder, mode, chosen, steps, timeout=600)
        for index, layout in enumerate(chosen):
            on_ranks = [results[index] for results in by_rank]
            assert_is_plain_torch(on_ranks, (expected_numbers, expected), start, layout)


def assert_is_plain_torch(
    by_rank: list[Trained], expected: Trained, start: dict, layout: Layout
) -> None:
    """Compare each rank's result with plain torch, and with the others to the last bit."""
    for numbers, parameters in by_rank:
        torch.testing.assert_close(
            torch.tensor(numbers), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6
        )
        assert_same_parameters(parameters, expected[1], start, layout)
        assert all(
            torch.equal(tensor, by_rank[0][1][name]) for name, tensor in parameters.items()
        ), layout


def assert_same_parameters(found: dict, expected: dict, start: dict, what: object) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        off = (tensor - expected[name]).norm()
        assert off <= 1e-5 * expected[name].norm(), (what, name)
        # of what was learned
        assert off <= 5e-4 * (expected[name] - start[name]).norm(), (what, name)


def plain_torch(folder: str, mode: str, steps: int = STEPS) -> Trained:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    decayed = [parameter for parameter in model.parameters()]

    optimizer = torch.optim.AdamW(
        decayed, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    numbers = []
    for _ in range(steps):
        per_sequence = [
            sequence_loss(model, experience(), index, mode) for index in range(len(RESPONSES))
        ]
        if mode in ("token-mean", "truncated"):
            loss = sum(values.sum() for values in per_sequence) / sum(RESPONSES)
        elif mode in ("seq-mean-token-mean", "gspo"):
            loss = sum(values.mean() for values in per_sequence) / len(RESPONSES)
        elif mode == "prompt-mean":
            pairs = zip(per_sequence[::2], per_sequence[1::2], strict=True)
            means = [torch.cat(pair).mean() for pair in pairs]
            loss = sum(means) / len(means)
        elif mode == "seq-mean-token-sum":
            loss = sum(values.sum() for values in per_sequence) / len(RESPONSES)
        else:
            loss = sum(values.sum() for values in per_sequence) / len(RESPONSES) / LONGEST

        loss.backward()
        numbers.append(
            [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()]
        )
        optimizer.step()
        optimizer.zero_grad()

    return numbers, tensors_of(model)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*model.named_parameters(), *persistent_buffers(model))
    return {name: tensor.detach() for name, tensor in tensors}


def sequence_loss(
    model: torch.nn.Module, whole: Experience, index: int, mode: str = "token-mean"
) -> torch.Tensor:
    """Return the loss per response token: clipped ratio with dual clip 3, and 0.1 of the k3 KL.

    With GSPO the ratio is the sequence's, and there is no dual clip.
    """
    start = int(whole.offsets[index])
    end = int(whole.offsets[index + 1])
    ids = whole.input_ids[start:end]
    part = slice(start + PROMPT, end)

    logits = model(ids[None], use_cache=False).logits[0, PROMPT - 1 : -1] / TEMPERATURE
    if mode == "truncated":
        ordered, order = logits.detach().topk(TOP_K)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        kept = (
            torch.zeros_like(logits, dtype=torch.bool)
            .scatter(1, order, before < TOP_P)
            .scatter(1, ids[PROMPT:, None], True)
        )
        logits = logits.masked_fill(~kept, -torch.inf)

    logprobs = logits.log_softmax(-1).gather(1, ids[PROMPT:, None])[:, 0]
    advantage = whole.advantages[part]
    old = whole.old_logprobs[part]
    reference = whole.reference_logprobs[part]
    log_ratio = logprobs - old
    if mode == "gspo":
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantage, ratio.clip(0.8, 1.3) * advantage)
    if mode != "gspo":
        loss = torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss)
    if mode == "prompt-mean" and (old - logprobs.detach()).mean() > DELTA:
        loss = torch.where(advantage < 0, 0.0, loss)
    difference = reference - logprobs

    return loss + 0.1 * (difference.exp() - difference - 1)


ALL_LAYOUTS = pytest.param("token-mean", marks=pytest.mark.slow)
TOO = [
    pytest.param(mode, marks=pytest.mark.slow)
    for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm")
]


@pytest.mark.parametrize("mode", [ALL_LAYOUTS, "seq-mean-token-mean", *TOO])
def test_every_layout_is_plain_torch(folder, mode):
    assert_all_are_plain_torch(folder, mode, LAYOUTS if mode == "token-mean" else [SMALL_ON_FOUR])


@pytest.mark.slow
def test_truncated_sampling_is_plain_torch_in_every_layout(folder):
    """The vocabulary is whole or in parts, and sequences are divided in both ways.

    Both strategies run, with several sizes of chunks.
    """
    layouts = [
        *(
            Layout(chunk=7 * 384),
            Layout(2, tp=2),
            Layout(2, tp=2, sequence=True, chunk=5 * 192),
            Layout(2, sp=2),
        ),
        *(
            Layout(2, sp=2, impl="zigzag", chunk=3 * 384),
            Layout(2, zero=3, tokens=40),
            Layout(4, tp=2, sp=2, impl="zigzag"),
        ),
    ]
    assert_all_are_plain_torch(folder, "truncated", layouts, steps=2)


@pytest.mark.slow
def test_a_loss_of_sequences_is_plain_torch_in_every_layout(folder):
    """Chunks hold whole sequences, or logits are computed again; ranks may have parts of them."""
    layouts = [
        *(Layout(chunk=7 * 384), Layout(chunk=1), Layout(2, tp=2, chunk=20 * 192)),
        *(Layout(2, sp=2, chunk=3 * 384), Layout(2, tokens=24, chunk=9 * 384)),
    ]
    assert_all_are_plain_torch(folder, "gspo", layouts, steps=2)


@pytest.mark.slow
def test_prompts_that_lie_on_several_ranks_are_plain_torch(folder):
    """The mean of each prompt is over all ranks, and bad sequences are masked whole."""
    layouts = [
        Layout(sequences=1, chunk=7 * 384),
        Layout(2, tokens=24, chunk=9 * 384),
        Layout(2, sp=2, chunk=3 * 384),
    ]
    assert_all_are_plain_torch(folder, "prompt-mean", layouts, steps=2)


def test_more_ranks_than_sequences(folder):
    """With two sequences on four ranks, two ranks compute a filler, and nothing changes."""
    global RESPONSES
    RESPONSES, kept = [3, 8], RESPONSES
    try:
        expected_numbers, _ = plain_torch(folder, "token-mean")
        numbers, _ = run_ranks(4, trained, folder, "token-mean", Layout(4))[0]
    finally:
        RESPONSES = kept
    torch.testing.assert_close(
        torch.tensor(numbers), torch.tensor(expected_numbers), rtol=1e-5, atol=1e-6
    )
