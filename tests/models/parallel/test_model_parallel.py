"""Ranks that share a replica of data have one set of prompts, samples and rewards.

It does not matter which ranks share an engine.
"""

import random

import pytest
import torch

from lightrft.core.samples import Prompt, Sample
from lightrft.engine.base import Sampling
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.rewards.functions import rewards
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy import FSDPStrategy
from models.parallel.families import family_model
from ranks import run_ranks

PROMPTS = [[50, 55, 43, 53], [49, 48], [57, 43, 49, 61, 50], [51], [60, 61, 62]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return family_model(tmp_path_factory.mktemp("model"), "qwen3", tie=True)


def strategy(**args) -> FSDPStrategy:
    args = {"tp_size": 2} | args
    made = FSDPStrategy(args={"fsdp": True, "prompt_max_len": 16, "generate_max_len": 16, **args})
    made.setup_distributed()
    return made


def positions(layout: dict) -> tuple:
    made = strategy(**layout)
    mesh = made.mesh
    sizes = [
        axis.size
        for axis in (mesh.world, mesh.data, mesh.shard, mesh.sp, mesh.tp, mesh.model_parallel)
    ]
    total = made.all_reduce(1.0, "sum"), made.all_gather(torch.tensor([mesh.data.rank])).tolist()
    rows = [
        row for batch in made.setup_dataloader(list(range(8)), 2, shuffle=False) for row in batch
    ]

    return sizes, mesh.data.rank, mesh.model_parallel.rank, *total, rows


def test_what_is_counted_are_replicas_of_data():
    rows = ([0, 1, 4, 5], [2, 3, 6, 7])
    for layout, sizes in (
        ({"tp_size": 2}, [4, 2, 2, 1, 2, 2]),
        ({"tp_size": 1, "cp_size": 2}, [4, 2, 4, 2, 1, 2]),
    ):
        expected = [(sizes, rank // 2, rank % 2, 2.0, [0, 1], rows[rank // 2]) for rank in range(4)]
        assert run_ranks(4, positions, layout) == expected


def test_all_ranks_may_share_one_replica_of_data():
    expected = [([4, 1, 2, 2, 2, 4], 0, rank, 1.0, [0], list(range(8))) for rank in range(4)]
    assert run_ranks(4, positions, {"sp_size": 2}) == expected


def generated(folder: str, engine_tp_size: int, layout: dict) -> tuple:
    """Return greedy answers, a local engine's answers, samples, and prompts per engine.

    The local engine gets the same prompts.
    """
    made = strategy(pretrain=folder, engine_type="hf", enable_engine_sleep=False, **layout)
    model = made.prepare(Actor(load_model(made.config)))
    engine = made.setup_inference_engine(actor=model)
    axis = made.mesh.engine(engine_tp_size)  # its ranks compute the same, as those of one engine do
    made.host.adopt(engine, axis, may_sleep=False)
    mine = PROMPTS[:2] if made.mesh.data.rank == 0 else PROMPTS[2:]
    counts = []
    begin = made.engine.begin_requests
    made.engine.begin_requests = lambda requests, loop: (
        counts.append(len(requests)),
        begin(requests, loop),
    )[1]
    greedy = made.gather_and_generate(Sampling(max_tokens=4, temperature=0.0), mine)
    drawn = made.gather_and_generate(Sampling(n=3, max_tokens=6, seed=5), mine)
    alone = made.engine_generate_local(Sampling(max_tokens=4, temperature=0.0), PROMPTS)
    answers = {tuple(one.prompt_token_ids): one.output_token_ids for one in alone}
    right = [
        samples[0].token_ids == answers[tuple(prompt)]
        for samples, prompt in zip(greedy, mine, strict=True)
    ]

    return right, [[sample.token_ids for sample in samples] for samples in drawn], counts[0]


COUNTS = {1: [1, 1, 1, 2], 2: [2, 2, 3, 3], 4: [5, 5, 5, 5]}
"""Prompts that the engine of each rank answers, by the size of an engine."""


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 1, "cp_size": 2}], ids=["tp", "cp"])
@pytest.mark.parametrize(
    ("engine_tp_size", "counts"),
    [
        pytest.param(size, counts, marks=pytest.mark.slow if size > 1 else ())
        for size, counts in COUNTS.items()
    ],
)
def test_samples_return_to_all_ranks_that_own_the_prompts(folder, engine_tp_size, counts, layout):
    results = run_ranks(4, generated, folder, engine_tp_size, layout)
    assert [right for right, _, _ in results] == [[True] * 2] * 2 + [[True] * 3] * 2
    assert [count for _, _, count in results] == counts, "no prompt is answered twice"
    drawn = [samples for _, samples, _ in results]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert [len(samples) for samples in drawn[0] + drawn[2]] == [3] * 5


def judged(fail: bool) -> list[float]:
    """A judge that never says the same twice."""
    mesh = strategy().mesh
    random.seed(mesh.world.rank)

    def moody(samples, **columns):
        if fail:
            raise KeyError("answer")
        return [[None, random.random()] for _ in samples]

    rewards.register("moody")(moody)
    samples = [Sample(Prompt(0, "", [1]), 0, [1, 2], [0.0, 0.0], "", "stop") for _ in range(3)]
    RewardRunner("moody", mesh.model_parallel)(samples)
    assert [sample.steps for sample in samples] == [[(1, sample.reward)] for sample in samples]
    return [sample.reward for sample in samples]


def test_one_judges_for_all_model_parallel_ranks():
    first, its_model_parallel_rank, other, its_other = run_ranks(4, judged, False)
    assert first == its_model_parallel_rank and other == its_other and first != other


def test_a_failing_judge_fails_on_all_model_parallel_ranks():
    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, judged, True)
    assert str(caught.value).count("ConfigError: --reward moody: KeyError: 'answer'") == 2
