"""Why: code written for opendilab/LightRFT's StrategyBase calls it in these forms; each must do
what it means there.
"""

from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from lightrft.engine.base import Sampling
from lightrft.strategy import EngineStatus, StrategyBase, StrategyConfig
from lightrft.strategy.call_forms import sampling_from_dict
from lightrft.strategy.fsdp import FSDPStrategy
from ranks import run_ranks
from strategy.test_engine import PROMPTS
from strategy.training import load, rows, share_of_loss, strategy, tokens_learned


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        (
            {"temperature": 0.7, "max_new_tokens": 9, "top_k": -1},
            Sampling(temperature=0.7, max_tokens=9, seed=5),
        ),
        (
            {"max_tokens": 9, "stop": "a", "skip_special_tokens": False, "min_p": 0.0},
            Sampling(max_tokens=9, stop=("a",), seed=5),
        ),
        (
            {"n": 2, "seed": 3, "stop_token_ids": [7], "repetition_penalty": 1.0},
            Sampling(n=2, seed=3, stop_token_ids=(7,)),
        ),
    ],
)
def test_sampling_parameters_as_a_dictionary(parameters, sampling):
    assert sampling_from_dict(parameters, seed=5) == sampling


@pytest.mark.parametrize(
    "parameters", [{"presence_penalty": 0.1}, {"temprature": 1.0}, {"repetition_penalty": 1.2}]
)
def test_parameters_that_no_engine_here_has_are_refused(parameters):
    with pytest.raises(ValueError, match="cannot sample with"):
        sampling_from_dict(parameters, seed=5)


def seed_calls(folder: str, out: str) -> dict:
    """Make the calls of a LightRFT trainer in the forms that it uses.

    Arguments are positional where LightRFT's callers pass them so.
    """
    made = strategy(pretrain=folder, engine_type="hf", prompt_max_len=16, generate_max_len=16)
    before = made.inference_engine, made.inference_engine_status
    with made.init_model_context(torch.device("cpu")):
        model = load(folder)
    model, optimizer = made.prepare((model, made.create_optimizer(model, lr=1e-2)))
    made.setup_inference_engine(made.config, engine_type="hf", actor=model)
    made.update_engine_weights(model)
    parameters = {"temperature": 0.0, "max_new_tokens": 4, "skip_special_tokens": False}
    texts = ["".join(chr(token) for token in prompt) for prompt in PROMPTS]
    outputs = made.gather_and_generate(parameters, PROMPTS, texts, None, False)
    awake = made.inference_engine_status
    greedy = made.gather_and_generate(Sampling(temperature=0.0, max_tokens=4), PROMPTS)

    drawn = [
        made.gather_and_generate({"max_new_tokens": 6}, all_prompt_token_ids=PROMPTS[:1])[0]
        for _ in range(2)
    ]
    loader = made.setup_dataloader(list(range(8)), 2, False, False, None, True)
    named = made.setup_dataloader(replay_buffer=list(range(8)), batch_size=2, shuffle=False)
    made.maybe_offload_optimizer(optimizer)
    made.maybe_load_optimizer(optimizer, torch.device("cpu"))
    paths = [made.save_ckpt(model, out) for _ in range(2)]
    StrategyBase.print("seen", StrategyBase.is_rank_0())
    FSDPStrategy.sync_and_clear_cache()
    groups = made.engine_mp_group, made.engine_dp_group, made.get_sequence_parallel_group()
    found = {
        "before": before,
        "prompts": [output.prompt_token_ids for output in outputs],
        "same": [output.output_token_ids for output in outputs]
        == [samples[0].token_ids for samples in greedy],
        "status": (awake, made.inference_engine_status, made.inference_engine_type),
        "engine": made.inference_engine is made.engine,
        "drawn": [one.output_token_ids for one in drawn],
        "loader": [batch for batch in loader],
        "named": [batch for batch in named],
        "paths": [path.name for path in paths],
        "rank 0": (StrategyBase.is_rank_0(), StrategyBase.get_rank()),
        "memory": sorted(StrategyBase.report_memory("after")),
        "groups": [
            None if group is None else dist.get_process_group_ranks(group) for group in groups
        ],
    }
    made.close()

    return found


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):
    return run_ranks(2, seed_calls, folder, str(tmp_path_factory.mktemp("checkpoints")))


def test_generation_in_the_seeds_forms(found):
    for one in found:
        assert one["before"] == (None, EngineStatus.SLEEPED) and one["engine"]
        assert one["prompts"] == PROMPTS and one["same"], (
            "ids are read where no prompt has media, and results know their prompt"
        )
        assert one["status"] == (EngineStatus.WAKEUP, EngineStatus.SLEEPED, "hf")
        assert one["drawn"][0] != one["drawn"][1], "a call without a seed draws anew"


def test_positions_and_defaults_of_the_seed(found):
    for rank, one in enumerate(found):
        assert one["loader"] == one["named"] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank]
        assert one["paths"] == ["save1", "save2"]
        assert one["rank 0"] == (rank == 0, rank) and one["memory"] == [
            "memory/in_use_gb",
            "memory/peak_gb",
        ]
        assert one["groups"] == [None, [0, 1], None]


def test_the_configuration_under_its_name_in_lightrft():
    made = StrategyConfig(bf16=True, actor_learning_rate=2e-6, mine=3)
    assert (made.bf16, made.actor_learning_rate, made.learning_rate, made.mine) == (
        True,
        2e-6,
        2e-6,
        3,
    )
    assert StrategyConfig.from_args(Namespace(bf16=True, mine=3)).extra_args == {"mine": 3}


def groups_of_a_shared_engine(folder: str) -> list:
    made = strategy(engine_tp_size=2, sp_size=2, pretrain=folder)
    return [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (
            made.engine_mp_group,
            made.engine_dp_group,
            made.get_sequence_parallel_group(),
        )
    ]


def test_groups_of_engines_and_sequences(folder):
    assert run_ranks(2, groups_of_a_shared_engine, folder) == [[[0, 1], None, [0, 1]]] * 2


def plain_module_under_sequence_parallelism(folder: str) -> float:
    """Both ranks compute the whole loss of all rows; returns the norm of the summed gradients."""
    made = strategy(sp_size=2, pretrain=folder, max_norm=0.0)
    model, optimizer = made.prepare((load(folder), None))
    model, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.0)
    loss = share_of_loss(model, rows(), tokens_learned(rows()))
    made.backward(loss, model, optimizer)
    return float(made.optimizer_step(optimizer, model))


def test_a_module_of_the_users_own_is_computed_whole_on_each_rank_of_a_sequence(folder):
    model = load(folder)
    share_of_loss(model, rows(), tokens_learned(rows())).backward()
    expected = float(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )
    assert run_ranks(2, plain_module_under_sequence_parallelism, folder) == pytest.approx(
        [expected] * 2, rel=1e-5
    )


def test_a_loader_without_data_is_refused():
    with pytest.raises(TypeError, match="takes a dataset"):
        FSDPStrategy(seed=1).setup_dataloader(batch_size=2)
