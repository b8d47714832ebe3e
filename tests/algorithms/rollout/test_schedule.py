"""Tail rounds with a real engine learn from each prompt once a pass.

They favour no length and no reward.
"""

import math
from bisect import bisect
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.algorithms.rollout.rollout import ResumableRollout
from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.algorithms.schedulers.rounds import Rounds
from lightrft.config import Config
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy import get_strategy
from ranks import run_cases
from tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer

pytestmark = pytest.mark.slow

KINDS = {range(97, 102): 1 / 4, range(102, 107): 1 / 16}
"""Tokens that follow each other, all with the same probability, and the probability with which each
is followed by the end."""
MARKED = {97, 102}
"""A response is right without these, which a long one hardly is."""
EDGES = [2, 3, 4, 6, 9, 13, 20, 32]
MOST = 32
PASSES = 2
ROWS = 320
BATCH = 16
SAMPLES = 4


def without_marks(samples, **columns):
    return [float(not MARKED.intersection(sample.token_ids)) for sample in samples]


def markov_chain(folder: Path) -> str:
    """Write a model whose next token depends only on the last one.

    The layers add nothing, and the embeddings are unit vectors.
    """
    config = Qwen3Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)

    with torch.no_grad():
        for matrix in (
            model.model.embed_tokens,
            model.model.layers[0].self_attn.o_proj,
            model.model.layers[0].mlp.down_proj,
        ):
            matrix.weight.zero_()

        model.lm_head.weight.fill_(-100)
        for kind, end in KINDS.items():
            columns = [token - 97 for token in kind]
            model.model.embed_tokens.weight[kind, columns] = 1
            model.lm_head.weight[kind.start : kind.stop, columns] = math.log((1 - end) / len(kind))
            model.lm_head.weight[EOS, columns] = math.log(end)

        # the norm makes unit vectors that long
        model.lm_head.weight /= math.sqrt(config.hidden_size)

    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def cell_probabilities(end: float) -> dict[tuple[int, float], float]:
    """Return the probability of each (length, reward).

    It is the probability of the end after the other tokens, or of MOST tokens without an end.
    """
    right = (1 - end) * 4 / 5
    cells = {}
    for length in range(1, MOST + 1):
        last, last_right = (end, end) if length < MOST else (1.0, end + right)
        cells[length, 1.0] = right ** (length - 1) * last_right
        cells[length, 0.0] = (1 - end) ** (length - 1) * last - cells[length, 1.0]
    return cells


def p_value(learned: list[tuple[int, int, float]]) -> float:
    """Return the p-value of Pearson's chi-square test.

    The cells are (kind, lengths between EDGES, reward). `learned` has (kind, length, reward) of
    every sample. Cells in which fewer than five are expected become one for each kind.
    """
    total = 0.0
    degrees = 0
    for kind, end in enumerate(KINDS.values()):
        expected = Counter()
        found = Counter()
        for (length, reward), probability in cell_probabilities(end).items():
            expected[bisect(EDGES, length), reward] += PASSES * ROWS / 2 * SAMPLES * probability
        found.update(
            (bisect(EDGES, length), reward) for of, length, reward in learned if of == kind
        )
        cells = [
            (found.pop(cell), mean)
            for cell, mean in expected.items()
            if mean >= 5 and cell in found
        ]
        rare = found.total(), PASSES * ROWS / 2 * SAMPLES - sum(mean for _, mean in cells)
        total += sum((count - mean) ** 2 / mean for count, mean in [*cells, rare])
        degrees += len(cells)

    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(total / 2)))


def learned_on_ranks(folder: str, schedule: str, resumes: bool) -> tuple[list, int]:
    """Return (step, row, [(kind, length, reward)]) of this rank's groups.

    Also return the number of groups that were deferred when it resumed.
    """
    flags = {
        "engine_type": "hf",
        "prompt_max_len": 8,
        "generate_max_len": MOST,
        "rollout_batch_size": BATCH,
    }
    flags |= {
        "n_samples_per_prompt": SAMPLES,
        "rollout_schedule": schedule,
        "over_sampling": 2.0,
        "early_stop_every": 2,
    }
    config = Config.of(pretrain=folder, **flags)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    strategy.setup_inference_engine()
    prompts = [Prompt(row, "", [97 + 5 * (row % 2) + row % 5], {}) for row in range(ROWS)]

    def new_rollout() -> ResumableRollout:
        rewards = RewardRunner(
            f"{__name__}:without_marks", section=replace(config.reward, reward_workers=0)
        )
        sampler = RunSampler(strategy, byte_tokenizer(), config.rollout)
        scheduler = Rounds(
            sampler, rewards, prompts, section=config.rollout, data=strategy.mesh.data, seed=4
        )
        return ResumableRollout(scheduler, rewards)

    rollout = new_rollout()
    learned = []
    num_deferred = 0

    for step in range(PASSES * ROWS // BATCH):
        if resumes and step == 7:
            state = deepcopy(rollout.state_dict())
            rollout = new_rollout()
            rollout.load_state_dict(state)
            num_deferred = len(state["deferred"])

        groups = rollout.collect(step, Metrics())
        rollout.score(groups)
        learned += [
            (
                step,
                group.row,
                [(group.row % 2, len(sample.token_ids), sample.reward) for sample in group.samples],
            )
            for group in groups
        ]

    strategy.close()
    return learned, num_deferred


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Schedule -> (groups of all ranks in the order of the steps, number of groups deferred).

    The groups were deferred where the run was resumed.
    """
    folder = markov_chain(tmp_path_factory.mktemp("chain"))
    cases = {
        schedule: (folder, schedule, schedule == "tail_rounds")
        for schedule in ("tail_rounds", "fifo")
    }
    found = run_cases(2, learned_on_ranks, cases)
    return {
        case: (sorted(first + second), num_deferred)
        for case, ((first, num_deferred), (second, _)) in found.items()
    }


def test_tail_rounds_learn_from_every_prompt_once_a_pass_also_when_resumed(runs):
    learned, num_deferred = runs["tail_rounds"]
    rows = [row for _, row, _ in learned]
    assert num_deferred > 0
    assert [Counter(rows[:ROWS]), Counter(rows[ROWS:])] == [Counter(range(ROWS))] * PASSES
    assert {
        Counter(step for step, *_ in learned)[step] for step in range(PASSES * ROWS // BATCH)
    } == {BATCH}


def test_tail_rounds_favour_no_length_and_no_reward(runs):
    """What is learned has the distribution that the weights define.

    Groups begin anew with their own seeds. Over-sampling alone loses long responses, and those are
    the wrong ones.
    """
    samples = {
        case: [sample for *_, group in learned for sample in group]
        for case, (learned, _) in runs.items()
    }
    assert p_value(samples["tail_rounds"]) > 0.01
    assert p_value(samples["fifo"]) < 1e-9
