"""Find where engine and trainer differ.

First the log-probs of every token are compared, then the outputs of the modules in order of
computation. The engine gets the weights from the weight stream, as in training, so the comparison
is valid for a run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.roles.policy import Policy
from lightrft.config.sections import Config
from lightrft.config.tables import table
from lightrft.core.engine import Request
from lightrft.core.samples import Completion
from lightrft.engine.model_info import never_sampled
from lightrft.engine.probe import LOGITS, MAX_MISMATCH, Probe
from lightrft.engine.requests import Sampling
from lightrft.extras.exact.install import make_actor_exact
from lightrft.extras.exact.products import LEAST
from lightrft.models.heads import Actor, logit_scale, logit_softcap
from lightrft.models.load import load_model
from lightrft.models.logits.logprobs import scaled_logits
from lightrft.models.qwen_omni import load_config
from lightrft.models.weight_files import NOT_THE_MODEL
from lightrft.strategy.strategy import StrategyBase

TEXTS = (
    "The quick brown fox jumps over the lazy dog. 27 + 58 =",
    "def mean(numbers):\n    return",
    "Question: a train leaves at 9:40 and arrives at 13:05. How long is the journey?\nAnswer:",
    "Once upon a time",
)
PROBE_SAMPLING = {
    "greedy": Sampling(temperature=0, max_tokens=32),
    "sampled": Sampling(n=4, max_tokens=32, seed=1),
}
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative difference of an output that rounding explains in the first layer.

It grows with the root of the depth.
"""

ADVICE = table("extras/tools/module_advice")


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences between the log-probs of some responses' tokens."""

    tokens: int
    mean: float
    largest: float
    mean_exp: float
    worst: str
    """Token with the largest difference, with both log-probs."""


@dataclass(frozen=True, slots=True)
class OutputGap:
    """Difference between outputs of a module: its norm over the norm of the trainer's."""

    name: str
    relative: float
    allowed: float

    @property
    def differs(self) -> bool:
        return not self.relative <= self.allowed  # NaN differs


@dataclass(slots=True)
class Diagnosis:
    """Result of comparing an engine with the trainer."""

    engine: str
    dtype: torch.dtype
    gaps: dict[str, Gap]
    outputs: list[OutputGap] = field(default_factory=list)
    """Differences of the outputs in order of computation.

    It is empty for an engine whose modules cannot be observed.
    """
    settings: list[str] = field(default_factory=list)
    """Differences of the two models' configurations."""
    exact: bool = False
    """Whether any difference is an error, as with --exact."""

    @property
    def first(self) -> OutputGap | None:
        """Return the first output that differs, or None."""
        return next((output for output in self.outputs if output.differs), None)

    @property
    def healthy(self) -> bool:
        allowed = 0.0 if self.exact else MAX_MISMATCH[self.dtype]
        within = all(gap.mean <= allowed for gap in self.gaps.values())
        return within and self.first is None

    @property
    def advice(self) -> str:
        if self.first is None:
            if self.healthy:
                return ""
            return (
                "the log-probs that the engine computes from the logits: no part of the model"
                " differs"
            )

        if self.exact:
            name = self.first.name
            return f"{name}: engine and trainer agree in every bit before it, and differ from it on"

        advice = ADVICE[self.first.name.rpartition(".")[2]]
        if self.settings:
            return f"{advice}. The settings differ in {'; '.join(self.settings)}"
        return advice


def diagnose(
    config: Config, strategy: StrategyBase, tokenizer: Tokenizer, engine_model: str = ""
) -> Diagnosis:
    """Diagnose `--pretrain`, on one process.

    `engine_model` is another folder for the engine, with the same names of weights.
    """
    pretrain = config.model.pretrain
    with strategy.init_model_context():
        actor = Actor(load_model(config.model))
    if config.engine.exact:
        make_actor_exact(actor, strategy.dtype, strategy.device, strategy.world)
    # The engine leaves these tokens out, so the trainer must do the same.
    banned = never_sampled(pretrain, actor.language_model.config, tokenizer)
    truncation = Sampling().resolved(banned).truncation
    policy = Policy(strategy, strategy.prepare(actor), truncation=truncation)
    engine_config = replace(config, model=replace(config.model, pretrain=engine_model or pretrain))
    strategy.setup_inference_engine(engine_config, config.engine.engine_type, actor=policy.actor)

    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    with strategy.engine_awake(policy.actor):
        requests = [Request(prompt) for prompt in prompts]
        responses = {
            name: strategy.engine.generate(requests, sampling)
            for name, sampling in PROBE_SAMPLING.items()
        }
        sequence = prompts[2] + responses["sampled"][2][0].token_ids
        engine_values = strategy.engine.module_outputs(sequence)

    gaps = {
        name: _gap(policy, prompts, completions, tokenizer.decode)
        for name, completions in responses.items()
    }
    trainer_values = trainer_outputs(policy, sequence)
    settings = []
    if engine_model:
        trusts = config.model.trust_remote_code
        settings = _settings(pretrain, engine_model, trust_remote_code=trusts)
    kept = (_without(banned, values) for values in (trainer_values, engine_values))

    exact = config.engine.exact
    output_gaps = compare(*kept, strategy.dtype, exact=exact)
    return Diagnosis(strategy.engine_name, strategy.dtype, gaps, output_gaps, settings, exact)


def _without(banned: Sequence[int], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs without the logits of tokens that are never sampled.

    An engine may have masked them already.
    """
    if LOGITS not in values:
        return values
    kept = torch.ones(values[LOGITS].shape[-1], dtype=torch.bool)
    kept[[token for token in banned if token < len(kept)]] = False
    return values | {LOGITS: values[LOGITS][:, kept]}


def compare(
    trainer_values: dict[str, Tensor],
    engine_values: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    exact: bool = False,
) -> list[OutputGap]:
    """Compare the outputs that both have, in the order of the trainer.

    With `exact` no difference is allowed.
    """
    depths = {
        name: next((int(word) for word in name.split(".") if word.isdigit()), None)
        for name in trainer_values
    }

    # Rounding errors grow with the depth, so each output is judged by its own.
    deepest = max((depth for depth in depths.values() if depth is not None), default=0)
    output_gaps = []
    for name, output in trainer_values.items():
        if name in engine_values and engine_values[name].shape == output.shape:
            relative = ((engine_values[name] - output).norm() / output.norm()).item()
            if name.endswith("embed_tokens"):
                depth = 0
            else:
                depth = deepest if depths[name] is None else depths[name]
            allowed = 0.0 if exact else ROUNDING[dtype] * math.sqrt(1 + depth)
            output_gaps.append(OutputGap(name, relative, allowed))

    return output_gaps


@torch.no_grad()
def trainer_outputs(policy: Policy, sequence: list[int]) -> dict[str, Tensor]:
    """Compute the outputs as Engine.module_outputs() does, for the actor as it is trained."""
    policy.prepare_for_logprobs()
    policy.actor.eval()
    model = policy.strategy.unwrap_model(policy.actor)
    logits = []
    probe = Probe(len(sequence))

    def head(module: nn.Module, arguments: Any, output: Any) -> None:
        # The weight is unsharded while the model computes. Several rows, because a product of one
        # row may round otherwise.
        last = output.last_hidden_state[0, -LEAST:]
        weight = model.get_output_embeddings().weight
        values = torch.empty(len(last), len(weight), device=last.device)
        logits.append(
            scaled_logits(last, weight, 1 / logit_scale(model), logit_softcap(model), out=values)
        )

    with model.base_model.register_forward_hook(head), probe.attached(model):
        policy.get_logprobs(_pad([sequence]))
    return probe.recorded(logits[0][-1])


def _gap(
    policy: Policy,
    prompts: list[list[int]],
    responses: list[list[Completion]],
    decode: Callable[[int], str],
) -> Gap:
    rows = [
        (prompt, sample)
        for prompt, samples in zip(prompts, responses, strict=True)
        for sample in samples
    ]
    sequences = _pad([prompt + sample.token_ids for prompt, sample in rows])
    logprobs = policy.get_logprobs(sequences)["logprobs"]
    pairs = [
        (trained, sampled, token)
        for row, (prompt, sample) in zip(logprobs.tolist(), rows, strict=True)
        for trained, sampled, token in zip(
            row[len(prompt) :], sample.logprobs, sample.token_ids, strict=False
        )
    ]
    gaps = torch.tensor(
        [abs(trained - sampled) for trained, sampled, _ in pairs], dtype=torch.float64
    )
    # NaN is the worst difference of all.
    trained, sampled, token = pairs[int(gaps.nan_to_num(torch.inf).argmax())]
    worst = f"token {token} {decode(token)!r}: trainer {trained:.6f}, engine {sampled:.6f}"

    return Gap(len(pairs), gaps.mean().item(), gaps.max().item(), gaps.exp().mean().item(), worst)


def _pad(sequences: list[list[int]]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return {"input_ids": ids, "input_lengths": lengths}


def _settings(*folders: str, trust_remote_code: bool) -> list[str]:
    trainer, engine = (
        load_config(folder, trust_remote_code=trust_remote_code).to_dict() for folder in folders
    )
    return [
        f"{name}: trainer {trainer.get(name)!r}, engine {engine.get(name)!r}"
        for name in sorted({*trainer, *engine})
        if trainer.get(name) != engine.get(name) and name not in NOT_THE_MODEL
    ]
