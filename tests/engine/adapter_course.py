"""Adapters alone in an engine: loads, what is generated, and what is noticed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.contract import PROMPTS, tampered
from lightrft.config import ModelSection
from lightrft.config.errors import ConfigError
from lightrft.engine.base import Engine, EngineError, Request, Sampling
from lightrft.engine.testing import start_engine
from lightrft.models.lora import (
    FACTOR_B,
    adapter_shapes,
    freeze_parameters,
    is_adapter,
    keep_adapters_apart,
    merge_adapters,
    split_adapters,
)
from lightrft.models.parallel.device import select_device
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.weight_sync.adapters import Adapters, names_of

SAMPLING = Sampling(n=2, max_tokens=12, seed=3)


def adapted(folder: str, dtype: torch.dtype = torch.float32, **section: Any) -> PreTrainedModel:
    """A model as a trainer has it: adapters in float32, the others in the dtype of the engine."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = {"lora_rank": 4, "lora_alpha": 12.0} | section
    freeze_parameters(model, ModelSection(pretrain=folder, **given))
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def trained(model: PreTrainedModel, seed: int, scale: float = 0.1) -> PreTrainedModel:
    """Give B other values, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(FACTOR_B):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def stream(model: PreTrainedModel, dtype: torch.dtype, *, base: bool) -> Iterator:
    named = [
        (name, parameter.detach().to(dtype))
        for name, parameter in model.named_parameters()
        if base or is_adapter(name)
    ]
    return split_adapters(model, named)


def adapters_of(model: PreTrainedModel, num_policies: int = 1) -> Adapters:
    return Adapters(adapter_shapes(model), num_policies)


def logprob_gap(
    model: PreTrainedModel, engine: Engine, reduce: str = "max", sampling: Sampling = SAMPLING
) -> float:
    """Compare the log-probs of an engine's samples with those of the trainer."""
    gaps = []
    for prompt, samples in zip(PROMPTS, generated(engine, sampling), strict=True):
        for sample in samples:
            ids = torch.tensor(prompt + sample.token_ids)
            with torch.no_grad():
                hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
            logits = hidden.float() @ model.get_output_embeddings().weight.float().T
            expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
            expected = expected.gather(1, ids[len(prompt) :, None])[:, 0]
            gaps.append((torch.tensor(sample.logprobs) - expected).abs())
    return getattr(torch.cat(gaps), reduce)().item()


def generated(engine: Engine, sampling: Sampling = SAMPLING) -> list:
    return engine.generate([Request(prompt) for prompt in PROMPTS], sampling)


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(merge_adapters(model, ((n, p.detach()) for n, p in model.named_parameters())))
    plain.load_state_dict(weights, strict=False)
    return plain


def raises(error: str, call: Any) -> bool:
    try:
        call()
    except (EngineError, ValueError) as problem:
        return error in str(problem)
    return False


def adapters_hold_the_policy(engine_type: str, folder: str) -> dict[str, Any]:
    """Return name of a check -> whether it holds; gap and effect are numbers."""
    dtype = torch.float32
    size = dist.get_world_size()
    axis = Mesh(select_device().type, tp=1).engine(size)
    model = adapted(folder)
    engine = start_engine(
        engine_type, folder, axis, from_stream=True, dtype=dtype, adapters=adapters_of(model, 2)
    )
    checks: dict[str, Any] = {"held": engine.adapters is not None}
    base = engine._fingerprints(dtype, None)

    def load(version: int, **options: Any) -> None:
        engine.load_weights(stream(model, dtype, base=not engine.has_base), version, **options)

    trained(model, 0)
    load(1)
    first = engine._engine_fingerprints(base)[0].clone()
    plain = merged(model, folder)
    checks["gap"] = max(logprob_gap(model, engine), logprob_gap(plain, engine))
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    checks["effect"] = logprob_gap(before, engine)

    # Twenty steps of adapters alone leave the weights as they are.
    for version in range(2, 22):
        trained(model, version)
        load(version)
    again = engine._engine_fingerprints(engine._fingerprints(dtype, None))[0]
    checks["the weights are untouched"] = torch.equal(first, again)
    checks["the newest adapters are used"] = logprob_gap(model, engine) < 1e-5
    checks["versions are told"] = {
        sample.weight_version for samples in generated(engine) for sample in samples
    } == {21}

    # What arrives otherwise than it was sent is noticed, and the next sync is complete.
    name = next(reversed(engine.adapters.shapes))
    for changed in (lambda b: b.neg(), lambda b: b.roll(1, 0), torch.zeros_like):
        with tampered(
            engine, lambda tensors, to=changed: tensors.update({name: to(tensors[name])})
        ):
            checks[f"noticed {len(checks)}"] = raises(
                f"{name} in the engine differs", partial(load, 22)
            )
        load(22)
    checks["missing is named"] = raises(
        "1 weights are missing",
        lambda: engine.load_weights(list(stream(model, dtype, base=False))[:-1], 23),
    )
    checks["a weight among adapters is named"] = raises(
        "came among adapters", lambda: engine.load_weights(stream(model, dtype, base=True), 23)
    )
    load(23)

    # The weights are compared with those that were sent once.
    engine.verify_round = 0
    load(24)
    corrupt(engine)
    engine.verify_round = 0
    checks["a changed weight is noticed"] = raises("in the engine differs", partial(load, 25))
    checks["it comes again"] = not engine.has_base
    load(25)

    # Level 1 keeps the weights, level 2 drops them.
    for level in (1, 2):
        engine.sleep(level)
        checks[f"kept at level {level}"] = engine.has_base is (level == 1)
        engine.wake("weights")
        load(26)
        engine.wake("kv_cache")
        checks[f"right after level {level}"] = logprob_gap(model, engine) < 1e-5

    checks |= loaded_under_requests(engine, model, load)
    engine.close()
    return checks


def corrupt(engine: Engine) -> None:
    """Change one norm in the engine's memory."""
    shim = vars(engine).get("_shim")
    model = shim.model if shim else engine.model
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] += 1


def loaded_under_requests(engine: Engine, model: PreTrainedModel, load: Any) -> dict[str, bool]:
    """Load other adapters while requests run."""
    greedy = Sampling(temperature=0, max_tokens=24)
    alone = [samples[0].token_ids for samples in generated(engine, greedy)]
    loop = engine.open(greedy)
    loop.add([Request(prompt) for prompt in PROMPTS])
    for _ in range(4):
        loop.step()
    trained(model, 77, scale=0.3)
    loop.engine.verify_round = 1
    loop.load_weights(stream(model, torch.float32, base=False), 27)
    later = loop.add([Request(PROMPTS[0])])
    ended = dict(loop.to_the_end())
    new = [samples[0].token_ids for samples in generated(engine, greedy)]
    went_on = [ended[index][0] for index in range(len(PROMPTS))]
    checks = {
        "later requests use the new ones": ended[later[0]][0].token_ids == new[0] != alone[0],
        "their version is told": set(ended[later[0]][0].weight_versions) == {27},
    }
    if engine.keeps_policy:
        checks["responses end as they began"] = [each.token_ids for each in went_on] == alone
        checks["and say so"] = all(set(each.weight_versions) == {26} for each in went_on)
        checks["a third policy has no slot"] = no_third_policy(engine, model)
    else:
        checks["responses go on with both"] = any(
            set(each.weight_versions) == {26, 27} for each in went_on
        )
    return checks


def no_third_policy(engine: Engine, model: PreTrainedModel) -> bool:
    """Two slots hold the newest policy and one that a request still uses; a third is refused."""
    loop = engine.open(Sampling(temperature=0, max_tokens=40))
    for version in (28, 29):
        loop.add([Request(PROMPTS[0])])
        loop.step()
        if version == 28:
            loop.load_weights(stream(model, torch.float32, base=False), version)
    return raises(
        "requests of 2 earlier policies still run",
        lambda: loop.load_weights(stream(model, torch.float32, base=False), 29),
    )


def bfloat16_gaps(engine_type: str, folder: str) -> tuple[float, float]:
    """Return the mean gap of log-probs between trainer and engine, without and with adapters."""
    axis = Mesh(select_device().type, tp=1).engine(1)
    dtype = torch.bfloat16
    model = adapted(folder, dtype)
    keep_adapters_apart(model)
    engine = start_engine(
        engine_type, folder, axis, from_stream=True, dtype=dtype, adapters=adapters_of(model)
    )
    gaps = []
    for scale in (0.0, 0.02):
        found = []
        for seed in range(4):
            trained(model, seed, scale)
            engine.load_weights(stream(model, dtype, base=not engine.has_base), seed)
            sampling = Sampling(n=8, max_tokens=16, seed=seed)
            found.append(logprob_gap(model, engine, "mean", sampling))
        gaps.append(sum(found) / len(found))
    engine.close()
    return gaps[0], gaps[1]


def problems_of_auto(folder: str) -> str:
    """Return what --lora_sync adapter says about a model of experts."""
    axis = Mesh(select_device().type, tp=1).engine(1)
    adapters = Adapters({name: torch.Size([4, 32]) for name in names_of("model.layers.0.q_proj")})
    options = {"from_stream": True, "adapters": adapters}
    merged_engine = start_engine("hf", folder, axis, **options)
    assert merged_engine.adapters is None
    merged_engine.close()
    try:
        start_engine("hf", folder, axis, {"lora_sync": "adapter"}, **options)
    except ConfigError as error:
        return str(error)
    return ""
