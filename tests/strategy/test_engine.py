"""Engine and trainer agree, whatever the layout. The engine is the embedded one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from lightrft.core.engine import derived_seed
from lightrft.engine.base import EngineError, Request, Sampling
from lightrft.models.weight_sync.stream import persistent_buffers
from lightrft.strategy import EngineStatus, FSDPStrategy
from ranks import run_cases, run_ranks
from strategy.training import load, one_step, strategy

PROMPTS = [[50, 55, 43, 53], [49, 48], [57, 43, 49, 61, 50], [51]]


def actor_with_engine(folder: str, **args):
    made = strategy(
        pretrain=folder, engine_type="hf", prompt_max_len=16, generate_max_len=16, **args
    )
    model = load(folder)
    model, optimizer = made.prepare((model, made.create_optimizer(model, lr=1e-2)))
    made.setup_inference_engine(actor=model)
    return made, model, optimizer


@torch.no_grad()
def logprobs_of(model, prompt, token_ids) -> list[float]:
    ids = torch.tensor(prompt + token_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].tolist()


def mismatch(folder: str, counts: tuple[int, int], args: dict):
    """Return the largest difference of log-probs before and after an optimizer step.

    Also return how far that step went.
    """
    made, model, optimizer = actor_with_engine(folder, **args)
    prompts = PROMPTS[: counts[made.get_rank()]]
    differences = []

    versions = []
    first = []
    for step in range(2):
        with made.engine_awake(model):
            assert made.engine_status is EngineStatus.WAKEUP
            completions = made.gather_and_generate(Sampling(n=3, max_tokens=8, seed=step), prompts)

        assert made.engine_status is EngineStatus.SLEEPED
        assert [len(samples) for samples in completions] == [3] * len(prompts)
        mine = [
            (prompt, sample)
            for prompt, samples in zip(prompts, completions, strict=True)
            for sample in samples
        ]

        for index in range(3 * max(counts)):  # every rank takes part in every forward
            prompt, sample = mine[index] if index < len(mine) else (PROMPTS[0], None)
            found = logprobs_of(model, prompt, sample.token_ids if sample else [1, 2])
            if sample:
                differences.append(
                    max(abs(a - b) for a, b in zip(found, sample.logprobs, strict=True))
                )
                versions.append(sample.weight_version)
                first.append(sample.logprobs[0])

        one_step(made, model, optimizer, step)

    version = made.engine.version
    made.close()
    return differences, versions, version


@pytest.mark.parametrize(
    "args",
    [
        {},
        pytest.param({"engine_sleep_level": 1}, marks=pytest.mark.slow),
        pytest.param({"enable_engine_sleep": True, "dp_replicate": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_engine_has_the_weights_of_the_actor_after_a_step(folder, args):
    """Also where ranks have different numbers of prompts, or none."""
    found = run_cases(
        2, mismatch, {counts: (folder, counts, args) for counts in ((3, 1), (0, 4), (0, 0))}
    )
    for counts, results in found.items():
        for count, (differences, versions, version) in zip(counts, results, strict=True):
            assert max(differences, default=0.0) < 1e-5
            assert versions == [2] * 3 * count + [3] * 3 * count
            assert version == 3


def local_results(folder: str):
    """A prompt of each rank's own, greedy, so that the answer tells whose it is."""
    made, model, _ = actor_with_engine(folder)
    mine = PROMPTS[:3] if made.is_rank_0() else PROMPTS[3:]
    with made.engine_awake(model):
        got = made.gather_and_generate(Sampling(max_tokens=4, temperature=0), mine)
        alone = [
            made.engine_generate_local(Sampling(max_tokens=4, temperature=0), [prompt])[0]
            for prompt in mine
        ]

    same_prompt = alone[0].prompt_token_ids == mine[0]
    return (
        [samples[0].token_ids for samples in got],
        [one.output_token_ids for one in alone],
        same_prompt,
    )


def test_results_come_back_in_order(folder):
    for got, alone, prompt_kept in run_ranks(2, local_results, folder):
        assert got == alone and prompt_kept


def same_prompts_everywhere(folder: str):
    made, model, _ = actor_with_engine(folder)
    with made.engine_awake(model):
        draw = [
            made.gather_and_generate(Sampling(n=4, max_tokens=6, seed=seed), PROMPTS[:1])
            for seed in (0, 0, 1)
        ]
    return [[sample.token_ids for sample in samples[0]] for samples in draw]


def test_replicas_and_steps_draw_differently_and_a_seed_repeats(folder):
    (first, again, second), (other, _, _) = run_ranks(2, same_prompts_everywhere, folder)
    assert first == again
    assert first != other and first != second


def test_derived_seeds_do_not_overlap():
    seeds = {
        derived_seed(*numbers)
        for seed in range(100)
        for other in range(100)
        for numbers in ((seed, other), (seed, other, 0))
    }
    assert len(seeds) == 20_000 and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(42, "evaluation") == 6692589767538822232


def with_seeds_of_requests(folder: str, order: list[int]):
    """Three samples of each prompt of this rank's share of the order."""
    made, model, _ = actor_with_engine(folder)
    mine = [
        row
        for index, row in enumerate(order)
        if index % made.mesh.world.size == made.mesh.world.rank
    ]
    requests = [
        Request(PROMPTS[row], seeds=tuple(derived_seed(row, sample) for sample in range(3)))
        for row in mine
    ]

    with made.engine_awake(model):
        drawn = made.gather_and_generate(
            Sampling(n=3, max_tokens=6, seed=made.get_rank()), requests=requests
        )

    return {
        row: [sample.token_ids for sample in samples]
        for row, samples in zip(mine, drawn, strict=True)
    }


def test_seeds_of_requests_decide_whatever_rank_answers(folder):
    (alone,) = run_ranks(1, with_seeds_of_requests, folder, [0, 1, 2, 3])
    first, second = run_ranks(2, with_seeds_of_requests, folder, [3, 0, 1, 2])
    assert first | second == alone and len(first) == len(second) == 2
    assert len({tuple(tokens) for samples in alone.values() for tokens in samples}) == 12


def awake_without_sleep(folder: str):
    made, model, optimizer = actor_with_engine(folder, enable_engine_sleep=False)
    before = made.engine_status
    made.maybe_sleep_inference_engine()
    dicts = made.engine_generate_local(Sampling(n=2, max_tokens=3), PROMPTS[:2])
    return before, made.engine_status, [sorted(one) for one in dicts], made.engine_name


def test_an_engine_that_may_not_sleep_stays_awake(folder):
    keys = [
        "finish_reason",
        "output_logprobs",
        "output_token_ids",
        "prompt_token_ids",
        "weight_version",
    ]
    assert run_ranks(1, awake_without_sleep, folder) == [
        (EngineStatus.WAKEUP, EngineStatus.WAKEUP, [keys] * 4, "hf")
    ]


def wake_and_sleep_twice(folder: str):
    made, model, optimizer = actor_with_engine(folder)
    made.maybe_sleep_inference_engine()
    made.wakeup_inference_engine()
    version = made.engine.version
    made.wakeup_inference_engine()

    return (
        made.engine_status,
        version,
        made.engine.version,
        len(made.engine_generate_local(Sampling(max_tokens=2), PROMPTS)),
    )


def test_waking_refills_dropped_weights_once(folder):
    assert run_ranks(2, wake_and_sleep_twice, folder) == [(EngineStatus.WAKEUP, 2, 2, 4)] * 2


def without_actor(folder: str):
    """Evaluate without an actor: the weights of --pretrain may be lost by no sleep."""
    made = strategy(pretrain=folder, engine_type="hf")
    status = made.engine_status
    made.setup_inference_engine()
    sampling = Sampling(max_tokens=4, temperature=0)
    first = made.engine_generate_local(sampling, PROMPTS)
    with made.engine_awake():
        second = made.engine_generate_local(sampling, PROMPTS)
    made.close()
    return status, first == second, made.engine_status


def test_an_engine_without_actor_keeps_its_weights(folder):
    assert run_ranks(1, without_actor, folder) == [
        (EngineStatus.SLEEPED, True, EngineStatus.SLEEPED)
    ]


def failing_inside(folder: str):
    made, model, _ = actor_with_engine(folder)
    with pytest.raises(ValueError, match="a reward"), made.engine_awake(model):
        raise ValueError("a reward")
    with pytest.raises(EngineError, match="sleeping"):
        made.engine_generate_local(Sampling(), PROMPTS)
    return made.engine_status


def test_an_error_inside_leaves_the_engine_asleep(folder):
    assert run_ranks(1, failing_inside, folder) == [EngineStatus.SLEEPED]


def with_buffers(folder: str):
    """Routing that no gradient changes.

    Returns whether the engine and a folder have it, and what the engine's sleep showed.
    """
    made, model, _ = actor_with_engine(folder)
    (name,) = [name for name, _ in persistent_buffers(model)]
    model.get_buffer(name).uniform_()
    made.update_engine_weights(model)
    found = made.engine.model.get_buffer(name)
    saved = load(made.save_model(model, None, folder + "/saved")).get_buffer(name)
    expected = model.get_buffer(name)
    made.maybe_sleep_inference_engine()
    return torch.equal(found, expected), torch.equal(saved, expected), sorted(made.engine_memory)


def test_buffers_that_belong_to_the_weights_are_streamed_and_saved(tmp_path):
    config = DeepseekV3Config(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=96,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    memory = ["memory/engine_asleep_gb", "memory/engine_awake_gb"]
    assert run_ranks(2, with_buffers, str(tmp_path)) == [(True, True, memory)] * 2


def test_no_engine_yet():
    made = FSDPStrategy()
    assert (made.engine_status, made.engine_name) == (EngineStatus.SLEEPED, "none")
    with pytest.raises(RuntimeError, match="setup_inference_engine"):
        made.gather_and_generate(Sampling(), [])
