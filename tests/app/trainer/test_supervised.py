"""Answers that are learned beside samples.

They add one more loss to each optimizer step, with a denominator of its own.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from algorithms.roles import rows
from app.trainer.in_turn import train_and_resume
from app.trainer.judged import PAIRS, course, write
from lightrft.algorithms.objectives import sft
from lightrft.app.run.run import Run
from lightrft.app.trainer.supervised import SupervisedTrainer
from lightrft.app.trainer.tasks.sft import PtxLoss
from lightrft.config import AlgorithmSection, Config, DataSection, TrainSection
from lightrft.core.metrics import Metrics
from lightrft.core.order import Order
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt
from lightrft.data.conversations import make_example
from lightrft.data.prompts import RowContext
from lightrft.models.parallel.mesh import collectives_begun
from ranks import run_cases, run_ranks
from runs import PPO, prepare, repeatable, run_here, train
from tiny import byte_tokenizer, tiny_model

ANSWERS = ["yes", "no, never", "a", "it is so", "bc", "0123456789", "d"]
COEFFICIENT = 0.7
ALGORITHM = AlgorithmSection(ptx_coef=COEFFICIENT)
TRAIN = TrainSection(train_batch_size=3, max_tokens_per_microbatch=24, seed=5)


def given() -> list[Prompt]:
    tokenizer = byte_tokenizer()
    rows = [{"input": f"{number}?", "label": answer} for number, answer in enumerate(ANSWERS)]
    return [make_example(RowContext(DataSection(), tokenizer), row) for row in rows]


def updated(folder: str):
    """[loss, norm] of three steps, the parameters after them, what was reported."""
    made = rows.strategy()
    policy = rows.policy(made, folder, max_tokens=24)
    metrics = Metrics()
    prompts = given()
    run = Run(Config(train=TRAIN, algorithm=ALGORITHM), made)
    ptx_loss = PtxLoss(run, policy, prompts, Order(len(prompts), TRAIN.seed))
    batch, (members,) = policy.redistribute(
        rows.share(rows.whole(), made.get_rank(), made.mesh.data.size)
    )

    numbers = []
    for _ in range(3):
        denominator = policy.denominator(batch, members)
        numbers.append(
            torch.stack(
                policy.learn([LossTerm(batch, members, sft, denominator), ptx_loss.next()], metrics)
            )
        )

    return (
        torch.stack(numbers),
        dict(made.full_params(policy.module)),
        metrics.reduce(made.mesh.data),
        ptx_loss.state_dict(),
    )


def plain(folder: str):
    """Take the steps in plain torch; samples and answers each have a mean over their own tokens.

    Samples are taken at the temperature of sampling, answers at 1.
    """
    model = rows.plain_model(folder)
    order = Order(len(ANSWERS), TRAIN.seed)
    batch = rows.whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    numbers = []
    seen = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.05 * (0.5 if step == 0 else 1.0)
        samples = [
            rows.plain_logprobs(model, batch["input_ids"][row, :length])[rows.PROMPT[row] :]
            for row, length in enumerate(rows.LENGTHS)
            if row != 3
        ]

        answers = []
        for row_index in order.rows(step * TRAIN.train_batch_size, TRAIN.train_batch_size):
            prompt = given()[row_index].token_ids
            answer = [*ANSWERS[row_index].encode(), 258]
            answers.append(
                rows.plain_logprobs(model, torch.tensor([*prompt, *answer]), 1.0)[len(prompt) :]
            )

        seen.append(-torch.cat(answers).detach())
        loss = -torch.cat(samples).mean() - COEFFICIENT * torch.cat(answers).mean()
        loss.backward()
        numbers.append([loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return torch.tensor(numbers), parameters, torch.cat(seen).mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_both_losses_are_plain_torch(folder, world_size):
    """Seven rows in batches of three: the third step begins the second pass."""
    numbers, parameters, reported = plain(folder)
    for found, tensors, metrics, state in run_ranks(world_size, updated, folder):
        torch.testing.assert_close(found, numbers, rtol=1e-5, atol=1e-6)
        assert all(
            (tensors[name] - wanted).norm() <= 1e-5 * wanted.norm()
            for name, wanted in parameters.items()
        )
        assert metrics["train/ptx_loss"] == pytest.approx(reported.item(), rel=1e-5)
        assert state == {"taken": 3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    flags = prepare(tmp_path_factory.mktemp("inputs"))
    return [
        *flags,
        f"--pretrain_data={flags[2].partition('=')[2]}",
        "--train_batch_size=16",
        "--ptx_coef=0.5",
    ]


@pytest.mark.slow
def test_answers_are_learned_and_a_run_goes_on(inputs, tmp_path):
    flags = [*inputs, *(flag for flag in PPO if not flag.startswith("--train_batch_size"))]
    saving = [f"--ckpt_path={tmp_path / 'checkpoints'}", "--save_steps=3"]
    whole, resumed = train_and_resume("train_ppo", 2, flags, tmp_path, stop=3, end=6, saving=saving)
    losses = [row["train/ptx_loss"] for row in whole]
    assert losses[-1] < losses[0] - 1, losses
    assert repeatable(resumed) == repeatable(whole)
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"input": "a", "label": "b"}\n' * 24)

    with pytest.raises(RuntimeError, match="the training data has changed, first in the rows"):
        train(
            "train_ppo",
            2,
            [*flags, *saving, f"--pretrain_data={answers}", "--load_checkpoint"],
            tmp_path / "parts",
        )


def test_too_few_answers_are_refused(inputs, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text('{"input": "a", "label": "b"}\n')
    with pytest.raises(
        RuntimeError,
        match="--pretrain_data .*: 1 rows do not fill one optimizer step of --train_batch_size 16",
    ):
        train(
            "train_ppo",
            1,
            [*inputs, *PPO, "--train_batch_size=16", f"--pretrain_data={few}"],
            tmp_path / "run",
        )


@pytest.mark.slow
def test_every_task_resumes_with_the_same_numbers(tmp_path):
    """Two steps, a checkpoint and two more steps equal four steps in one run.

    Metrics and weights agree to the last bit. For train_rm, whose model train_prm has too, see
    test_reward_model.py; for train_sft, test_template_date.py.
    """
    prepare(tmp_path)
    answers = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": row["tie"]} for row in PAIRS
    ]
    tasks = {"train_dpo": (PAIRS, ["--precompute_reference"]), "train_kto": (answers, [])}

    cases = {}
    for command, (data, flags) in tasks.items():
        file = write(data, tmp_path / f"{command}.jsonl")
        flags = [
            "--fsdp",
            f"--pretrain={tmp_path}/model",
            f"--prompt_data={file}",
            "--num_episodes=9",
            "--save_steps=2",
            *flags,
        ]

        for run, added in {
            "whole": [],
            "begun": ["--max_steps=2"],
            "resumed": ["--load_checkpoint"],
        }.items():
            folder = "whole" if run == "whole" else "parts"
            cases[command, run] = (
                command,
                [*flags, "--max_steps=4", *added],
                f"{tmp_path}/{command}/{folder}",
            )

    found = {case: by_rank[0] for case, by_rank in run_cases(2, course, cases).items()}
    for command in tasks:
        (whole, expected), (resumed, weights) = found[command, "whole"], found[command, "resumed"]
        assert len(found[command, "begun"][0]) == 2 and repeatable(resumed) == repeatable(whole)
        assert weights.keys() == expected.keys() and all(
            torch.equal(weights[name], expected[name]) for name in weights
        )


@pytest.mark.parametrize(
    ("loss", "stop", "ends"),
    [(0.4, 0.5, True), (0.5, 0.5, False), (0.1, None, False), (float("nan"), 0.5, False)],
)
def test_a_run_that_ends_early_says_why(loss, stop, ends):
    said = []
    run = SimpleNamespace(
        loss=loss, done=7, config=SimpleNamespace(train=TrainSection(stop_loss=stop))
    )
    run.strategy = SimpleNamespace(print=said.append)
    assert SupervisedTrainer.enough(run) is ends
    assert said == (
        ["the loss of step 7, 0.4, is below --stop_loss 0.5: the run ends here"] if ends else []
    )


def collectives_of_steps(flags: list[str]) -> list[int]:
    """Return how many collectives began from the start of each step to the start of the next."""
    begun = []
    step = SupervisedTrainer.step

    def counted(trainer, number):
        begun.append(sum(collectives_begun().values()))
        return step(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisedTrainer, "step", counted)
        run_here("train_sft", flags)
    return [after - before for before, after in pairwise(begun)]


def test_a_step_of_replicas_has_few_collectives(tmp_path):
    """In each of them all ranks wait for the slowest one.

    They sum the gradients and the loss, and gather digests with signals, and the metrics.
    """
    inputs = [each for each in prepare(tmp_path) if not each.startswith("--reward")]
    flags = [*inputs, "--dp_replicate=0", "--train_batch_size=4", "--max_steps=6"]
    flags += ["--logging_steps=3", "--trace_steps=0", f"--save_path={tmp_path}/run"]
    for counts in run_ranks(2, collectives_of_steps, flags):
        assert counts == [3, 3, 4, 3, 3]
