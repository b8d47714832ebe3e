"""Routers use the experts that an engine chose, and learn as if they had chosen them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flat_models import TEMPERATURE, gradients_of, make_batch, make_model, weighted
from lightrft.config.facts import BIASED_FAMILIES, EXPERT_FAMILIES
from lightrft.core.batch import RoutedShape, missing_expert
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.attention.recurrent import install
from lightrft.models.balance import routing
from lightrft.models.heads import Actor
from lightrft.models.parallel.expert_parallel import routers
from lightrft.models.parallel.recompute import recompute
from lightrft.models.routers import RouterChoices, Routers
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from models.parallel.families import family_config


def mixture(family: str) -> Actor:
    torch.manual_seed(0)
    config = family_config(family, tie=False, vocabulary=261)
    config._attn_implementation = ATTENTION
    model = AutoModelForCausalLM.from_config(config)
    install(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return Actor(model).train()


def chosen_by(actor: Actor, batch) -> Tensor:
    """Return what the routers of a model choose by themselves: [T, layers, k]."""
    experts = RoutedShape.of(actor.hf_model.config).empty(batch.num_tokens)

    def keep(number: int):
        def hook(_, __, output) -> None:
            experts[:, number] = output[2].to(experts.dtype)

        return hook

    hooks = [
        router.register_forward_hook(keep(number))
        for number, router in routers(actor.hf_model).items()
    ]
    with torch.no_grad():
        actor(batch, TEMPERATURE)
    for hook in hooks:
        hook.remove()
    return experts


def learned(actor: Actor, batch) -> tuple[Tensor, dict[str, Tensor]]:
    values = actor(batch, TEMPERATURE)
    actor.zero_grad()
    weighted(values).backward()
    return values[0].detach(), gradients_of(actor)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_router_chooses_what_was_recorded(family: str) -> None:
    batch = make_batch([16] * 4, 0)
    plain = mixture(family)
    chosen = chosen_by(plain, batch)
    expected, gradients = learned(plain, batch)

    for policy in ("", "full", "selective"):
        actor = mixture(family)
        if policy:
            recompute(actor, policy)
        actor.router_choices = RouterChoices(actor.hf_model)

        found, of_found = learned(actor, replace(batch, experts=chosen))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_found[name], gradient, rtol=1e-4, atol=1e-5)
        assert not any(actor.router_choices.last.changed.values())

        # Other experts than the router's give other log-probs, and each change is counted once.
        other = (chosen + 1) % 4
        changed, of_changed = learned(actor, replace(batch, experts=other))
        assert not torch.allclose(changed, expected, atol=1e-3)
        layers = actor.router_choices.layers
        report = actor.router_choices.report(actor.sequence)["train/replay_changed"]
        assert report.weight == batch.num_tokens * len(layers) and report.values > 0.5
        for name in of_changed:
            if "gate.weight" in name or "router.weight" in name:
                assert of_changed[name].abs().sum() > 0, "routers learn"
        loads = torch.stack(list(actor.router_choices.last.loads.values()))
        assert loads.sum(1).tolist() == [2 * batch.num_tokens] * len(layers)


def test_tokens_without_a_record_choose_freely() -> None:
    batch = make_batch([16] * 4, 4)
    actor = mixture("qwen3_moe")
    chosen = chosen_by(actor, batch)
    expected, _ = learned(actor, batch)
    actor.router_choices = RouterChoices(actor.hf_model)

    some = chosen.clone()
    some[::3] = missing_expert(chosen.dtype)
    shared = find_shared_prefixes(batch.input_ids, batch.lengths)
    assert shared is not None
    for rows in (batch, replace(batch, shared=shared)):
        found, _ = learned(actor, replace(rows, experts=some))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert not any(actor.router_choices.last.changed.values())


@pytest.mark.parametrize("family", BIASED_FAMILIES)
def test_biases_move_against_the_load(family: str) -> None:
    actor = mixture(family)
    actor.router_choices = choices = RouterChoices(actor.hf_model, bias_rate=0.01)
    batch = make_batch([16] * 4, 0)
    peaks = []
    for _ in range(40):
        learned(actor, batch)
        load = choices.load(actor.sequence)
        assert load.shape == (len(choices.layers), 4)
        before = [bias.clone() for bias in choices.biases]
        peaks.append(choices.balance(load)["train/expert_load_max"].item())
        for old, new, of_layer in zip(before, choices.biases, load, strict=True):
            expected = 0.01 * (of_layer.mean() - of_layer).sign()
            torch.testing.assert_close(new - old, expected, rtol=0, atol=1e-6)
    assert peaks[-1] < peaks[0]


def test_the_loss_of_the_load_counts_what_biases_choose() -> None:
    """MiniMax-M2 chooses by the sigmoid and a bias; here the bias decides."""
    actor = mixture("minimax_m2")
    bias = torch.tensor([0.0, 3.0, 2.0, 0.0])
    for name, buffer in actor.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(bias)

    watched = Routers(actor.hf_model, 1.0)
    with watched.watch() as outputs, torch.no_grad():
        actor(make_batch([16] * 4, 0), TEMPERATURE)
    weight = torch.ones(len(outputs[0][0]))
    expected = sum(
        weight @ torch.zeros_like(logits).scatter_(1, (logits.sigmoid() + bias).topk(2)[1], 1.0)
        for logits, _ in outputs
    )
    assert routing(outputs, weight).chosen.tolist() == expected.tolist()
    assert expected.tolist() == [0, len(outputs) * len(weight), len(outputs) * len(weight), 0]


def test_routers_without_a_bias_and_unknown_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="--router_replay does not support LlamaForCausalLM"):
        RouterChoices(make_model("llama", ATTENTION))
    with pytest.raises(ValueError, match="--router_bias_rate: routers of Qwen3MoeForCausalLM have"):
        RouterChoices(mixture("qwen3_moe").hf_model, bias_rate=0.001)
