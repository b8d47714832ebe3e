"""Rows of judged answers, whole runs that learn from them on gloo ranks, and the same in plain
torch, one sequence at a time.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.app.run.prepare import prepare_config
from lightrft.config import ModelSection, parse
from lightrft.core.order import Order
from lightrft.strategy import get_strategy
from ranks import run_cases, run_ranks, whole
from runs import build, rows_of, run_here

EOS = 258
SEED = 42
BATCH = 4
STEPS = 3
RATE = 1e-3
RANK = 4
ANSWERS = [
    "yes",
    "no, never",
    "a",
    "it is so",
    "bc",
    "0123456789",
    "d",
    "perhaps, or not",
    "so",
    "why",
    "none",
    "x",
]
PAIRS = [
    {
        "prompt": "abcdefgh"[: 2 + index % 5] + "?",
        "chosen": answer,
        "rejected": ANSWERS[(index + 5) % 12],
        "margin": index / 8,
        "tie": index % 3 == 0,
        "head": "ab"[index % 2],
    }
    for index, answer in enumerate(ANSWERS)
]
RUN = [
    f"--train_batch_size={BATCH}",
    f"--max_steps={STEPS}",
    f"--actor_learning_rate={RATE}",
    "--lr_scheduler=constant",
    "--l2=0",
    "--lr_warmup_ratio=0",
    "--max_tokens_per_microbatch=80",
    "--report_to=jsonl",
    f"--seed={SEED}",
    "--max_norm=0.5",
]
LAYOUTS = {
    "fsdp": ["--fsdp", "--max_tokens_per_microbatch=40"],
    "zero3": ["--fsdp=false", "--zero_stage=3"],
    "sp": ["--fsdp", "--sp_size=2"],
    "tp": ["--fsdp", "--tp_size=2"],
    "hsdp": ["--fsdp", "--dp_replicate=2"],
}
"""Flags of two ranks that divide answers in different ways."""


def write(rows: list[dict[str, Any]], file: Path) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def course(
    command: str, flags: list[str], save_path: str
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Metrics of the steps, and the weights of the exported model; on every rank."""
    run_here(command, [*RUN, *flags, f"--save_path={save_path}"])
    return rows_of(Path(save_path)), weights(Path(save_path) / "model")


def weights(folder: Path) -> dict[str, Tensor]:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    auto = (
        AutoModelForSequenceClassification
        if kind.endswith("Classification")
        else AutoModelForCausalLM
    )
    model = auto.from_pretrained(folder, dtype=torch.float32)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def plain(
    model: nn.Module,
    loss: Callable[[nn.Module, list[dict[str, Any]]], Tensor],
    rows: list,
    extra: tuple = (),
) -> tuple:
    """Losses, norms and final parameters of the same steps, with `loss` of a whole step."""
    trained = [*(parameter for parameter in model.parameters() if parameter.requires_grad), *extra]
    optimizer = torch.optim.AdamW(trained, RATE, (0.9, 0.95), weight_decay=0.0)

    numbers = []
    order = Order(len(rows), SEED)
    for step in range(STEPS):
        total = loss(model, [rows[row] for row in order.rows(step * BATCH, BATCH)])
        total.backward()
        numbers.append((total.item(), nn.utils.clip_grad_norm_(trained, 0.5).item()))
        optimizer.step()
        optimizer.zero_grad()

    return numbers, {name: parameter.detach() for name, parameter in model.named_parameters()}


def first_parameters(command: str, flags: list[str], save_path: str) -> dict[str, Tensor]:
    """Return what a run of these flags trains, before its first step.

    The names begin with the layers of the model, or with the head.
    """
    config = prepare_config(command, parse([*RUN, *flags, f"--save_path={save_path}"], command))
    strategy = get_strategy(config)
    torch.manual_seed(0)
    strategy.setup_distributed()
    trainer = build(command, config, strategy)
    trained = {
        tail(name): whole(value.detach()).clone()
        for name, value in trainer.role.module.named_parameters()
        if value.requires_grad
    }
    strategy.close()

    return trained


def tail(name: str) -> str:
    return re.sub(r"^.*?\b(?=layers\.|score\b)", "", name)


def plain_adapters(
    command: str,
    flags: list[str],
    base: nn.Module,
    loss: Callable[..., Tensor],
    rows: list,
    folder: Path,
) -> tuple:
    """Take the same steps with PEFT's model and the first adapters of a run of these flags.

    Return losses, norms and merged parameters.
    """
    (first,) = run_ranks(1, first_parameters, command, [*flags, "--fsdp"], f"{folder}/first")
    kind = TaskType.CAUSAL_LM if base.can_generate() else TaskType.SEQ_CLS
    settings = LoraConfig(
        r=RANK, lora_alpha=ModelSection().lora_alpha, target_modules="all-linear", task_type=kind
    )
    model = get_peft_model(base, settings)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == len(first) and sum("lora_B" in name for name in trained) > 0

    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(first[tail(name.replace("modules_to_save.default.", ""))])

    numbers, _ = plain(model.get_base_model(), loss, rows)
    return numbers, dict(model.merge_and_unload().named_parameters())


def assert_adapters_equal(command: str, flags: list[str], expected: tuple, folder: Path) -> None:
    """Compare the same steps on two ranks, sharded by FSDP2 and by ZeRO 2."""
    layouts = {"fsdp": ["--fsdp"], "zero2": ["--fsdp=false", "--zero_stage=2"]}
    cases = {
        name: (command, [*flags, *layout], f"{folder}/{name}") for name, layout in layouts.items()
    }
    for by_rank in run_cases(2, course, cases).values():
        for found in by_rank:
            assert_equal(found, expected)


def tokens(*texts: str) -> Tensor:
    return torch.tensor([*"".join(texts).encode(), EOS])


def score(model: nn.Module, prompt: str, answer: str) -> Tensor:
    """Scores of the heads at the end token: [K]."""
    hidden = model.model(tokens(prompt, answer)[None], use_cache=False).last_hidden_state
    return model.score(hidden)[0, -1]


def answer_logprobs(model: nn.Module, prompt: str, answer: str) -> Tensor:
    """Log-probs of the answer's tokens: [n]."""
    ids = tokens(prompt, answer)
    logprobs = (
        model(ids[None], use_cache=False)
        .logits[0, :-1]
        .log_softmax(-1)
        .gather(1, ids[1:, None])[:, 0]
    )
    return logprobs[len(prompt.encode()) - 1 :]


def assert_equal(found: tuple, expected: tuple) -> None:
    """Assert that losses, norms and parameters are equal to 1e-5.

    The parameters are compared as one vector, because Adam makes whole steps of gradients that are
    only rounding.
    """
    (rows, parameters), (numbers, wanted) = found, expected
    torch.testing.assert_close(
        torch.tensor([[row["train/loss"], row["train/grad_norm"]] for row in rows]),
        torch.tensor(numbers),
        rtol=1e-5,
        atol=1e-6,
    )
    assert parameters.keys() == wanted.keys()
    ours, plain = (
        torch.cat([named[name].flatten() for name in wanted]) for named in (parameters, wanted)
    )
    assert (ours - plain).norm() <= 1e-5 * plain.norm()
