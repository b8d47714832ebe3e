"""The policy generates what transformers would, and hands the device to the engine and back."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorithms.roles import rows
from lightrft.algorithms.objectives import sft
from lightrft.engine.base import EngineError, Sampling
from lightrft.strategy.phases import Phase, PhaseError
from ranks import run_cases, run_ranks
from tiny import EOS, PAD, byte_tokenizer

NEW = 6


def start(folder: str, **args):
    options = {
        "pretrain": folder,
        "engine_type": "hf",
        "prompt_max_len": 32,
        "generate_max_len": NEW,
    } | args
    made = rows.strategy(**options)
    policy = rows.policy(made, folder, folder, tokenizer=byte_tokenizer())
    made.setup_inference_engine(actor=policy.actor)
    return policy, rows.share(rows.whole(), made.get_rank(), made.mesh.data.size)


def generated(folder: str):
    """Generate after an optimizer step, so that the weights must have been streamed.

    Returns greedy, sampled, and sampled again.
    """
    policy, mine = start(folder)
    policy.width_multiple = 16
    policy.train(mine, sft)
    policy.prepare_for_generation()
    results = [policy.generate(mine, greedy=True), policy.generate(mine), policy.generate(mine)]
    policy.finish_generation()
    again = {
        "input_ids": results[1]["output_ids"],
        "input_lengths": results[1]["unpadded_sequence_lengths"],
    }
    logprobs = policy.get_logprobs(again)["logprobs"]
    policy.save_checkpoint(f"{folder}/trained")

    return results, logprobs


def test_greedy_is_transformers_and_sampled_logprobs_are_the_trainers(folder):
    per_rank = run_ranks(2, generated, folder)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/trained", dtype=torch.float32)
    batch = rows.whole()
    row = 0
    for index in range(3):  # greedy, sampled, once more
        assert {results[index]["output_ids"].shape[1] for results, _ in per_rank} == {32}

    for (greedy, sampled, again), logprobs in per_rank:
        for index in range(len(greedy["output_ids"])):
            ids = batch["input_ids"][row, : rows.LENGTHS[row]]
            expected = model.generate(
                ids[None],
                attention_mask=torch.ones_like(ids)[None],
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=EOS,
                pad_token_id=PAD,
            )[0]
            length = greedy["unpadded_sequence_lengths"][index]
            assert greedy["output_ids"][index, :length].tolist() == expected.tolist()
            assert greedy["generation_lengths"][index] == length - len(ids)
            assert (greedy["output_ids"][index, length:] == PAD).all()
            with torch.no_grad():
                raw = rows.plain_logprobs(model, expected, temperature=1.0)[len(ids) :]

            torch.testing.assert_close(
                greedy["logprobs"][index, len(ids) : length], raw, rtol=0, atol=1e-4
            )
            end = sampled["unpadded_sequence_lengths"][index]
            response = slice(len(ids), end)
            torch.testing.assert_close(
                sampled["logprobs"][index, response], logprobs[index, response], rtol=0, atol=1e-4
            )

            assert (sampled["logprobs"][index, : len(ids)] == 0).all() and (
                sampled["logprobs"][index, end:] == 0
            ).all()
            row += 1

        if len(sampled["output_ids"]):
            assert not torch.equal(sampled["output_ids"], again["output_ids"])

    assert row == 10


def phases(folder: str, flag: bool):
    """Run a whole step by the explicit methods; return (phase, actor here, optimizer here) after
    each.
    """
    policy, mine = start(folder, offload_idle=flag)
    made = policy.strategy
    seen = []

    def look(*verbs):
        for verb in verbs:
            verb()
            state = policy.optimizer.state.values()
            optimizer = all(
                moment.device.type == "cpu" for value in state for moment in value.values()
            )
            seen.append(
                (made.phase.value, next(policy.actor.parameters()).device.type == "cpu", optimizer)
            )

    look(policy.prepare_for_training)
    loss = policy.train(mine, sft)["loss"]
    version = made.engine.version
    look(
        policy.offload_before_refit,
        lambda: made.update_engine_weights(policy.actor),
        policy.offload_after_refit,
    )
    look(policy.prepare_for_generation)
    streams = made.engine.version - version
    with pytest.raises(PhaseError, match="phase TRAIN cannot begin in phase GENERATE"):
        policy.train(mine, sft)

    with pytest.raises(
        PhaseError, match="phase LOGPROB cannot begin in phase GENERATE.*finish_generation"
    ):
        policy.get_logprobs(mine)

    policy.generate(mine)
    look(
        policy.finish_generation,
        policy.prepare_for_logprobs,
        policy.finish_inference,
        policy.prepare_for_training,
    )
    look(policy.finish_training)
    second = policy.train(mine, sft)["loss"]

    with pytest.raises(
        RuntimeError, match=r"generate\(\) in phase TRAIN: call prepare_for_generation\(\) first"
    ):
        policy.generate(mine)

    with pytest.raises(EngineError, match="sleeping"):
        made.engine_generate_local(Sampling(), [[1]])
    return seen, streams, loss.item(), second.item()


def test_a_step_by_hand(folder):
    found = run_cases(2, phases, {flag: (folder, flag) for flag in (True, False)})
    (idle, streams, *losses), (kept, _, *expected) = found[True][0], found[False][0]
    assert losses == expected and losses[0] > losses[1]
    assert streams == 1  # the one by hand; prepare_for_generation() had nothing to add
    assert (
        [phase for phase, *_ in idle]
        == [phase for phase, *_ in kept]
        == [
            "TRAIN",
            "REFIT",
            "REFIT",
            "REFIT",
            "GENERATE",
            "LOGPROB",
            "LOGPROB",
            "LOGPROB",
            "TRAIN",
            "LOGPROB",
        ]
    )
    here = (True, True)
    away = (False, False)
    only_actor = (True, False)
    assert [tuple(where) for _, *where in idle] == [
        here,
        only_actor,
        only_actor,
        away,
        away,
        away,
        only_actor,
        away,
        here,
        away,
    ]
    # the explicit verbs offload anyway, and it all stays once it is back
    assert [tuple(where) for _, *where in kept] == [
        here,
        only_actor,
        only_actor,
        away,
        away,
        away,
        only_actor,
        only_actor,
        here,
        here,
    ]


def refits(folder: str):
    policy, _ = start(folder, engine_sleep_level=1)
    info = policy.refit_info()
    stream = {name: tensor.clone() for name, tensor in policy.stream_weights()}
    policy.offload_before_refit()
    before = policy.strategy.engine.version
    policy.prepare_for_generation()  # nobody streamed: the engine's weights are old
    after = policy.strategy.engine.version
    policy.prepare_for_generation()

    return (
        info,
        {name: (tensor.shape, tensor.dtype) for name, tensor in stream.items()},
        (
            after - before,
            policy.strategy.engine.version - after,
            policy.strategy.phase is Phase.GENERATE,
        ),
    )


def test_refit_info_is_what_the_stream_brings_and_old_weights_never_generate(folder):
    for info, stream, versions in run_ranks(2, refits, folder):
        assert info == stream and list(info) == list(stream) and len(info) > 20
        assert versions == (1, 0, True)


def files(folder: str, root: str):
    policy, mine = start(folder)
    policy.start_profiling(f"{root}/profile")
    with pytest.raises(RuntimeError, match="is already active"):
        policy.start_profiling(root)
    policy.train(mine, sft)
    trace = policy.stop_profiling()
    with pytest.raises(RuntimeError, match="start_profiling"):
        policy.stop_profiling()
    policy.save_checkpoint(f"{root}/weights", f"{root}/training/three", f"{root}/tokenizer")
    expected = policy.train(mine, sft)
    other, _ = start(folder)
    other.strategy.load_ckpt(other.actor, f"{root}/training", "three", items={"policy": other})
    found = other.train(mine, sft)
    policy.start_profiling(f"{root}/profile2")
    policy.shutdown()
    policy.shutdown()

    return (
        trace,
        [result["loss"].item() for result in (expected, found)],
        [r["grad_norm"].item() for r in (expected, found)],
    )


def test_files(folder, tmp_path):
    results = run_ranks(2, files, folder, str(tmp_path))
    for rank, (trace, losses, norms) in enumerate(results):
        assert trace == tmp_path / "profile" / f"trace_rank{rank}.json"
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert any("aten::" in str(name) for name in names)
        assert (tmp_path / "profile2" / f"trace_rank{rank}.json").is_file()
        assert losses[0] == losses[1] and norms[0] == norms[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer").pad_token_id == PAD
    AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
