"""Why: a plan that forgets one sum trains silently wrong.

Every family, tied and untied, must give the log-probs, the logits and EVERY gradient of the plain
model in one process, on every rank, with a vocabulary that does not divide.
"""

import math
from collections import Counter

import pytest
import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from algorithms.roles import rows
from lightrft.config import ModelSection
from lightrft.core.batch import Batch
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.lora import freeze_parameters, keep_adapters_apart
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.recompute import recompute
from lightrft.models.parallel.tensor_parallel import model_problems, parallelize, plan_problems
from lightrft.strategy import FSDPStrategy
from lightrft.versions import TENSOR_PARALLEL_VERSIONS
from models.parallel.families import FAMILIES, OTHERS, family_config, family_model
from ranks import run_cases, run_ranks, whole

LENGTHS = [5, 12, 2, 9]
TEMPERATURE = 0.7

Values = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    names = {
        f"{family}{suffix}": (family, tie)
        for family in FAMILIES
        for suffix, tie in (("", False), ("-tied", True))
    }
    return {
        name: family_model(tmp_path_factory.mktemp(name), family, tie=tie)
        for name, (family, tie) in names.items()
    }


def sequences(vocabulary: int = 261) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 261, (length,), generator=generator) % vocabulary for length in LENGTHS
    ]


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss where both results matter, with another weight for each token."""
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    return (logprobs * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()


def plain(folder: str) -> tuple[list[Tensor], Values, Tensor]:
    """Return log-probs of each sequence, gradients, and the logits of the first sequence.

    Nothing of lightrft is used.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logprobs = []
    rows = sequences(model.config.vocab_size)
    for ids in rows:
        logp = (model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs.append(logp.gather(1, ids[1:, None])[:, 0])
        loss_of(logprobs[-1], -(logp.exp() * logp).sum(-1)).backward()

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return (
        [values.detach() for values in logprobs],
        gradients,
        model(rows[0][None]).logits[0].detach(),
    )


def batch_of(sequences: list[Tensor]) -> Batch:
    return Batch(
        lengths=torch.tensor([len(ids) for ids in sequences]),
        input_ids=torch.cat(sequences),
        loss_mask=torch.cat([torch.arange(len(ids)) > 0 for ids in sequences]),
        rows=torch.arange(len(sequences)),
    )


def strategy(**args) -> FSDPStrategy:
    made = FSDPStrategy(args={"fsdp": True, **args})
    made.setup_distributed()
    return made


def split(
    folders: dict[str, str], args: dict
) -> tuple[int, dict[str, tuple[list[Tensor], Values, Tensor]]]:
    """Return this rank's index among the data ranks, and for each model what plain() gives.

    The sequences are the rank's own.
    """
    made = strategy(**args)
    results = {}
    data = made.mesh.data
    for name, folder in folders.items():
        actor = made.prepare(Actor(load_model(ModelSection(pretrain=folder))).train())
        every = sequences(actor.language_model.config.vocab_size)
        mine = every[data.rank :: data.size]
        logprobs, entropy = actor(batch_of(mine), TEMPERATURE)
        rows = [values.split([len(ids) for ids in mine]) for values in (logprobs, entropy)]
        loss = sum(
            loss_of(values[1:], its_entropy[1:]) for values, its_entropy in zip(*rows, strict=True)
        )
        made.backward(loss, actor)
        gradients = {key: whole(p.grad) for key, p in actor.hf_parameters()}
        logits = None

        if actor.sequence.multiple == 1:
            model = made.prepare(AutoModelForCausalLM.from_pretrained(folder))
            logits = model(every[0][None]).logits[0].detach().clone()

        results[name] = [values[1:].detach() for values in rows[0]], gradients, logits

    return data.rank, results


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def split_in_turn(
    folders: dict[str, str], layouts: list[dict]
) -> list[tuple[int, dict[str, tuple]]]:
    return [split(folders, layout) for layout in layouts]


LAYOUTS = {
    2: [{}, {"tp_sequence_parallel": True}],
    4: [{}, {"dp_replicate": 2}, {"tp_sequence_parallel": True}],
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_gradient_of_every_family_is_that_of_the_plain_model(folders, world_size):
    layouts = [{"tp_size": 2, **args} for args in LAYOUTS[world_size]]
    by_rank = run_ranks(world_size, split_in_turn, folders, layouts, timeout=600)
    for name, folder in folders.items():
        logprobs, gradients, logits = plain(folder)
        assert min(gradient.norm() for gradient in gradients.values()) > 1e-3, (
            "a gradient of nothing proves nothing"
        )
        for index, layout in enumerate(layouts):
            first = by_rank[0][index][1][name][1]
            for data_rank, results in (rank[index] for rank in by_rank):
                its_logprobs, its_gradients, its_logits = results[name]
                for found, expected in zip(
                    its_logprobs, logprobs[data_rank :: world_size // 2], strict=True
                ):
                    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

                if its_logits is not None:
                    torch.testing.assert_close(its_logits, logits, rtol=0, atol=1e-5)
                assert its_gradients.keys() == gradients.keys()
                wrong = {key: distance(its_gradients[key], gradients[key]) for key in gradients}
                assert max(wrong.values()) < 1e-4, (layout, name, wrong)
                assert all(torch.equal(its_gradients[key], first[key]) for key in gradients), (
                    "replicas would drift apart"
                )


@pytest.mark.slow
def test_families_with_the_same_names_and_shapes(tmp_path):
    """Sinks belong to heads, and experts are whole on each rank, also in their gradients."""
    folders = {name: family_model(tmp_path / name, name) for name in OTHERS}
    dense = {
        name: folder
        for name, folder in folders.items()
        if name not in ("gpt_oss", "mixtral", "qwen3_moe")
    }
    cases = [(folders, {"tp_size": 2}), (dense, {"tp_size": 2, "tp_sequence_parallel": True})]
    expected = {name: plain(folder) for name, folder in folders.items()}
    for by_case in run_ranks(2, split_each, cases, timeout=600):
        for (_, results), (chosen, layout) in zip(by_case, cases, strict=True):
            assert results.keys() == chosen.keys()
            for name, (logprobs, gradients, _) in results.items():
                known_logprobs, known, _ = expected[name]
                for found, value in zip(logprobs, known_logprobs, strict=True):
                    torch.testing.assert_close(found, value, rtol=0, atol=1e-5)
                assert gradients.keys() == known.keys()
                wrong = {key: distance(gradients[key], known[key]) for key in known}
                assert max(wrong.values()) < 1e-4, (layout, name, wrong)


def with_adapters(folders: dict[str, str], layouts: list[dict]) -> list[dict[str, Values]]:
    """Return the gradients of adapters whose B is not 0, for each layout."""
    results = []
    for layout in layouts:
        made = strategy(**layout)
        found = {}
        for name, folder in folders.items():
            torch.manual_seed(0)
            section = ModelSection(pretrain=folder, lora_rank=3)
            model = freeze_parameters(load_model(section), section)
            for key, parameter in model.named_parameters():
                if ".lora_B." in key:
                    parameter.data.normal_(std=0.3)
            actor = made.prepare(Actor(model).train())
            if layout.get("bf16"):
                keep_adapters_apart(actor.language_model)
            logprobs, entropy = actor(batch_of(sequences()), TEMPERATURE)
            made.backward(loss_of(logprobs, entropy), actor)
            found[name] = {
                key: whole(parameter.grad)
                for key, parameter in actor.hf_parameters()
                if parameter.requires_grad
            }
        results.append(found)
    return results


@pytest.mark.slow
def test_adapters_of_split_layers(folders, tmp_path):
    """Each rank has a shard of A or of B, and the other matrix whole. Phi-3 has fused layers."""
    chosen = {name: folders[name] for name in ("qwen2", "gemma3")}
    chosen["phi3"] = family_model(tmp_path, "phi3")
    layouts = [{"tp_size": 2}, {"tp_size": 2, "tp_sequence_parallel": True}]
    ((expected,),) = run_ranks(1, with_adapters, chosen, [{}])
    for by_layout in run_ranks(2, with_adapters, chosen, layouts):
        for layout, found in zip(layouts, by_layout, strict=True):
            for name, gradients in expected.items():
                num_linear = 4 if name == "phi3" else 7
                assert found[name].keys() == gradients.keys()
                assert len(gradients) == 2 * 2 * num_linear
                wrong = {key: distance(found[name][key], gradients[key]) for key in gradients}
                assert max(wrong.values()) < 1e-4, (layout, name, wrong)


@pytest.mark.slow
def test_adapters_of_split_layers_in_bfloat16(folders):
    """The engine's formula, with A and B rounded, is as close to float32 as without a split."""
    chosen = {"qwen2": folders["qwen2"]}
    ((exact,),) = run_ranks(1, with_adapters, chosen, [{}])
    ((alone,),) = run_ranks(1, with_adapters, chosen, [{"bf16": True}])
    layouts = [{"tp_size": 2, "bf16": True}]
    for (found,) in run_ranks(2, with_adapters, chosen, layouts):
        for key, gradient in exact["qwen2"].items():
            rounding = distance(alone["qwen2"][key], gradient)
            assert distance(found["qwen2"][key], gradient) < 2 * max(rounding, 0.02), key


def split_each(cases: list[tuple[dict[str, str], dict]]) -> list:
    return [split(folders, layout) for folders, layout in cases]


def split_and_streamed(folders: dict[str, str]) -> tuple[int, dict, dict[str, Values]]:
    """Return what split() gives in FSDP2 x tp, and the streams."""
    data_rank, results = split(folders, {"tp_size": 2})
    made = strategy(tp_size=2)
    streams = {}
    for name, folder in folders.items():
        actor = made.prepare(Actor(load_model(ModelSection(pretrain=folder))))
        streams[name] = {key: tensor.clone() for key, tensor in made.full_params(actor)}
    return data_rank, results, streams


@pytest.mark.slow
def test_layers_of_other_layouts_in_fsdp2_and_tensor_parallelism(tmp_path):
    """Ranks store consecutive rows of fused layers, so streams have the layout of the folder."""
    folders = {name: family_model(tmp_path / name, name) for name in ("glm4", "olmo2", "phi3")}
    expected = {name: plain(folder) for name, folder in folders.items()}
    for data_rank, results, streams in run_ranks(4, split_and_streamed, folders, timeout=600):
        for name, (logprobs, gradients, _) in results.items():
            known_logprobs, known, _ = expected[name]
            for found, value in zip(logprobs, known_logprobs[data_rank::2], strict=True):
                torch.testing.assert_close(found, value, rtol=0, atol=1e-5)
            wrong = {key: distance(gradients[key], known[key]) for key in known}
            assert max(wrong.values()) < 1e-5, (name, wrong)

            weights = dict(AutoModelForCausalLM.from_pretrained(folders[name]).named_parameters())
            assert streams[name].keys() == weights.keys()
            assert all(torch.equal(streams[name][key], weights[key]) for key in weights)


def stream(folder: str, sequence: bool) -> list[int]:
    """Return how many of 28 tokens this rank has between the modules of a block.

    It is measured where a block begins, and after each of its norms.
    """
    made = strategy(tp_size=2, tp_sequence_parallel=sequence)
    seen = []
    actor = made.prepare(Actor(load_model(ModelSection(pretrain=folder))))
    for name, submodule in actor.language_model.get_decoder().layers[0].named_modules():
        if not name:
            submodule.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        elif name.endswith("layernorm"):
            submodule.register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
    actor(batch_of(sequences()), TEMPERATURE)
    return seen


def test_each_rank_keeps_a_part_of_the_tokens(folders):
    found = run_cases(
        2, stream, {sequence: (folders["gemma3"], sequence) for sequence in (True, False)}
    )
    assert found == {True: [[14] * 5] * 2, False: [[28] * 5] * 2}


@pytest.mark.slow
def test_four_ranks_and_recomputed_activations(tmp_path):
    """The second model has biases everywhere, a row of padding without a gradient, and one row for
    the last rank.
    """
    heads = {"heads": 8, "kv_heads": 4}
    biased = {"vocabulary": 10, "pad": 1, "attention_bias": True, "mlp_bias": True}
    folders = {
        "qwen3": family_model(tmp_path / "qwen3", "qwen3", tie=True, **heads),
        "biased": family_model(tmp_path / "biased", "llama", **heads, **biased),
        "phi3": family_model(tmp_path / "phi3", "phi3", **heads),
        "olmo2": family_model(tmp_path / "olmo2", "olmo2", **heads),
    }
    expected = {name: plain(folder) for name, folder in folders.items()}
    assert not expected["biased"][1]["model.embed_tokens.weight"][1].any()
    args = {"tp_size": 4, "gradient_checkpointing": True}

    layouts = [args, args | {"gradient_checkpointing_policy": "selective"}]
    layouts += [layout | {"tp_sequence_parallel": True} for layout in layouts]
    for results in run_ranks(4, split_in_turn, folders, layouts):
        for layout, (_, result) in zip(layouts, results, strict=True):
            for name, (_, gradients, logits) in expected.items():
                assert result[name][1].keys() == gradients.keys()
                assert (
                    max(distance(result[name][1][key], gradients[key]) for key in gradients) < 1e-4
                )
                assert (
                    "tp_sequence_parallel" in layout
                    or (result[name][2] - logits).abs().max() < 1e-5
                )


# -- what a layer costs

SUM = "c10d::allreduce_"
SCATTER = "c10d::_reduce_scatter_base_"
GATHER = "c10d::_allgather_base_"
KINDS = SUM, SCATTER, GATHER
WAIT = "wait for the sum"


class Operations(TorchDispatchMode):
    """While entered, notes the name of every operation, with the shape of a matrix product."""

    def __init__(self):
        super().__init__()
        self.seen: list[str | tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        product = function.name() in ("aten::mm", "aten::addmm")
        self.seen.append(tuple(result.shape) if product else function.name())
        return result


def decoder_pass(model: nn.Module, policy: str | None, operations: Operations) -> None:
    """Note the operations of two layers, the embedding and the norm behind them, on 28 tokens.

    Forward and backward.
    """
    if policy:
        recompute(model.train(), policy)
    ids = torch.cat(sequences())[None]
    positions = torch.arange(ids.shape[1])[None]
    with operations:
        model.get_decoder()(ids, position_ids=positions, use_cache=False)[0].sum().backward()


def split_decoder_pass(folder: str, policy: str | None, sequence: bool) -> list:
    model = AutoModelForCausalLM.from_pretrained(folder)
    parallelize(model, strategy(tp_size=2).mesh.tensor, sequence=sequence)
    operations = Operations()
    begin = Axis.begin_sum

    def begin_noted(axis: Axis, value: Tensor):
        wait = begin(axis, value)

        def noted() -> Tensor:
            operations.seen.append(WAIT)
            return wait()

        return noted

    Axis.begin_sum = begin_noted
    try:
        decoder_pass(model, policy, operations)
    finally:
        Axis.begin_sum = begin
    return operations.seen


COLLECTIVES = {
    # The embedding has one sum in the forward pass, and each of two layers has four in all.
    (None, False): {SUM: 1 + 8},
    ("selective", False): {SUM: 1 + 8 + 2},
    ("full", False): {SUM: 1 + 8 + 2},
    # Tokens are also gathered behind the last norm, and so are gradients of the embedding.
    (None, True): {SCATTER: 1 + 8, GATHER: 2 + 8},
    ("selective", True): {SCATTER: 1 + 8 + 2, GATHER: 2 + 8 + 4},
    ("full", True): {SCATTER: 1 + 8 + 2, GATHER: 2 + 8 + 4},
}


def test_collectives_and_copies_of_a_layer(folders):
    """Recomputation sums once more what attention adds, and nothing is copied."""
    folder = folders["qwen3"]
    found = run_cases(2, split_decoder_pass, {case: (folder, *case) for case in COLLECTIVES})
    for case, expected in COLLECTIVES.items():
        for seen in found[case]:
            assert Counter(each for each in seen if each in KINDS) == expected, case

    unsplit = Operations()
    decoder_pass(AutoModelForCausalLM.from_pretrained(folder), None, unsplit)
    clones = unsplit.seen.count("aten::clone")
    assert all(0 < found[None, each][0].count("aten::clone") <= clones for each in (False, True))
    # The reduce-scatter of gloo copies by itself.
    assert "aten::copy_" not in found[None, False][0]


def test_the_gradient_of_the_tokens_is_summed_beside_products_of_weights(folders):
    (seen, _) = run_ranks(2, split_decoder_pass, folders["qwen3"], None, False)
    order = [each for each in seen if isinstance(each, tuple) or each in (SUM, WAIT)]
    # Five sums are in the forward pass.
    begins = [index for index, each in enumerate(order) if each == SUM][5:]
    # A rank has 32 rows of q_proj, 16 of k_proj and v_proj, and 24 of gate_proj and up_proj.
    beside = [order[begin + 1 : order.index(WAIT, begin)] for begin in begins]
    assert beside == [[(24, 32)] * 2, [(32, 32), (16, 32), (16, 32)]] * 2


def planned_operations(folder: str, sequence: bool) -> list[int]:
    """Count operations on DTensors that torch has planned.

    It counts before and after three updates of different length.
    """
    made = strategy(tp_size=2, tp_sequence_parallel=sequence)
    count = []
    propagator = DTensor._op_dispatcher.sharding_propagator
    plan = propagator.propagate_op_sharding_non_cached
    planned = []
    propagator.propagate_op_sharding_non_cached = lambda schema: (
        planned.append(schema) or plan(schema)
    )

    actor = Actor(load_model(ModelSection(pretrain=folder)))
    actor, optimizer = made.prepare((actor, made.create_optimizer(actor, lr=0.1)))
    for number in (2, 3, 4):
        count.append(len(planned))
        logprobs, _ = actor(batch_of(sequences()[:number]), 1.0)
        made.backward(logprobs.sum(), actor, optimizer)
        made.optimizer_step(optimizer, actor)

    return [*count, len(planned)]


def test_a_new_number_of_tokens_costs_no_planning_of_operations(folders):
    for sequence, by_rank in run_cases(
        2, planned_operations, {each: (folders["qwen3"], each) for each in (False, True)}
    ).items():
        for first, second, third, last in by_rank:
            assert sequence or 0 < first < second, "nothing is counted"
            assert second == third == last


BF16 = {
    1: [{}],
    2: [
        {"tp_size": 2},
        {"tp_size": 2, "tp_sequence_parallel": True},
        {"sp_size": 2},
        {"cp_size": 2},
    ],
    4: [{"tp_size": 2, "cp_size": 2}],
}


@pytest.mark.slow
def test_bf16_rounds_as_in_one_process(folders):
    """Every layout is about as far from float32 as a single process in bfloat16."""
    chosen = {name: folders[name] for name in ("qwen3", "gemma3-tied")}
    expected = {name: plain(folder)[1] for name, folder in chosen.items()}
    alone: dict[str, float] = {}
    for ranks, layouts in BF16.items():
        by_rank = run_ranks(
            ranks, split_in_turn, chosen, [layout | {"bf16": True} for layout in layouts]
        )
        for index, layout in enumerate(layouts):
            for name, gradients in (
                (name, results[index][1][name][1]) for results in by_rank for name in chosen
            ):
                assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
                found = max(distance(gradients[key], expected[name][key]) for key in expected[name])
                assert 0 < found < 1.5 * alone.setdefault(name, min(found, 0.1)), (layout, name)


def scores(folder: str, sequence: bool) -> tuple[Tensor, Values]:
    made = strategy(tp_size=2, tp_sequence_parallel=sequence)
    scorer = made.prepare(rows.scorer(folder).train())
    found = scorer(batch_of(sequences()[:3]))
    made.backward((found * torch.linspace(-1, 1, len(found))).sum(), scorer)
    return found.detach(), {
        name: whole(parameter.grad) for name, parameter in scorer.hf_parameters()
    }


def test_a_scorer_keeps_its_head_whole(folders):
    """Critics and reward models; 19 tokens."""
    folder = rows.dense_scorer(folders["gemma3"], seed=1)
    scorer = rows.scorer(folder)
    expected = scorer(batch_of(sequences()[:3]))
    (expected * torch.linspace(-1, 1, len(expected))).sum().backward()

    gradients = {name: parameter.grad for name, parameter in scorer.hf_parameters()}
    for by_rank in run_cases(
        2, scores, {sequence: (folder, sequence) for sequence in (False, True)}
    ).values():
        for found, its_gradients in by_rank:
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
            assert its_gradients.keys() == gradients.keys()
            assert max(distance(its_gradients[name], gradients[name]) for name in gradients) < 1e-4


def frozen_and_poisoned(folder: str) -> tuple:
    """Check that a frozen copy stays frozen.

    A loss that is not a number on one rank of a group skips the step on all.
    """
    made = strategy(tp_size=2)
    frozen = made.prepare(Actor(load_model(ModelSection(pretrain=folder))).requires_grad_(False))
    trained = [name for name, parameter in frozen.named_parameters() if parameter.requires_grad]
    actor = Actor(load_model(ModelSection(pretrain=folder)))
    actor, optimizer = made.prepare((actor, made.create_optimizer(actor, lr=0.1)))
    before = {name: tensor.clone() for name, tensor in made.full_params(actor)}
    logprobs, _ = actor(batch_of(sequences()), 1.0)
    made.backward(logprobs.sum() * (math.nan if made.mesh.tp.rank == 1 else 1.0), actor, optimizer)
    norm = made.optimizer_step(optimizer, actor)
    same = all(torch.equal(tensor, before[name]) for name, tensor in made.full_params(actor))

    return trained, norm.isfinite().item(), made.skipped_steps, same


def test_frozen_models_and_steps_that_are_not_finite(folders):
    assert run_ranks(2, frozen_and_poisoned, folders["qwen3-tied"]) == [([], False, 1, True)] * 2


# -- what cannot be split


def test_all_problems_of_a_model_at_once():
    config = FAMILIES["llama"][0](hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    assert model_problems(config, 3) == []
    assert model_problems(config, 4) == [
        "tp_size 4 does not divide its 6 attention heads",
        "tp_size 4 does not divide its 3 key-value heads",
    ]


@pytest.mark.parametrize("size", [4, 7, 8, 10])
def test_parts_of_different_sizes_are_not_refused(size):
    config = FAMILIES["llama"][0](
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, vocab_size=size
    )
    assert model_problems(config, 4) == []


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 5}, {"vocab_size": 9}, {"vocab_size": 1}, {"intermediate_size": 2}]
)
def test_a_rank_without_rows_is_refused(sizes):
    """It could not look up a token, and the other ranks would wait for its summand."""
    config = FAMILIES["llama"][0](
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, **sizes
    )
    (size,) = sizes.values()
    ranks = len(torch.zeros(size).chunk(4))
    (problem,) = model_problems(config, 4)
    assert problem.startswith(f"its {size} ") and problem.endswith(
        f" are too few: only {ranks} ranks have some"
    )


def starcoder2() -> None:
    """Its feed-forward layers have other names."""
    config = Starcoder2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        vocab_size=32,
    )
    strategy(tp_size=2).prepare(Starcoder2ForCausalLM(config))


def test_an_unknown_family_is_refused_by_name():
    message = "'starcoder2' has no plan; supported are arcee, cohere, "
    with pytest.raises(RuntimeError, match=message):
        run_ranks(2, starcoder2)


def test_fused_columns_that_ranks_cannot_exchange_are_refused():
    config = family_config("phi3", tie=False, vocabulary=261)
    config.intermediate_size = 50
    assert model_problems(config, 2) == []
    assert model_problems(config, 4)[-1] == "tp_size 4 does not divide its 50 fused columns"


def test_blocks_that_the_plan_was_not_written_for():
    """A version of transformers that renames or adds a module must not train wrongly in silence."""
    model = Qwen3ForCausalLM(family_config("qwen3", tie=False, vocabulary=261))
    assert plan_problems(model) == []
    block = model.model.layers[0]
    block.mlp.gate = block.mlp.__dict__["_modules"].pop("gate_proj")
    block.extra_norm = nn.LayerNorm(32)
    (problem,) = plan_problems(model)
    assert (
        "blocks have extra_norm, input_layernorm, mlp.down_proj, mlp.gate, mlp.up_proj" in problem
    )


def versions_said() -> str:
    lines: list[str] = []
    logger.add(lambda line: lines.append(str(line)), format="{message}")
    strategy(tp_size=2)
    return "".join(lines)


def test_versions_outside_of_the_tested_range_are_named(monkeypatch):
    assert run_ranks(2, versions_said) == ["", ""]
    monkeypatch.setitem(TENSOR_PARALLEL_VERSIONS, "torch", "<2.0")
    said, other = run_ranks(2, versions_said)
    assert (
        f"--tp_size is not tested with torch {torch.__version__} (tested: <2.0)" in said
        and other == ""
    )


def other_module() -> None:
    made = strategy(tp_size=2)
    parallelize(nn.Linear(2, 2), made.mesh.tensor)


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(RuntimeError, match="--tp_size 2: Linear contains no transformers model"):
        run_ranks(2, other_module)
