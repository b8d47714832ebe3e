"""Rows of judged answers, whole runs that learn from them on gloo ranks, and the same in plain torch, one sequence at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.data.loader import Order
from runs import rows_of, run_here

EOS, SEED, BATCH, STEPS, RATE = 258, 42, 4, 3, 1e-3
ANSWERS = ["yes", "no, never", "a", "it is so", "bc", "0123456789", "d", "perhaps, or not", "so", "why", "none", "x"]
PAIRS = [
    {"prompt": "abcdefgh"[: 2 + place % 5] + "?", "chosen": answer, "rejected": ANSWERS[(place + 5) % 12],
     "margin": place / 8, "tie": place % 3 == 0, "head": "ab"[place % 2]}
    for place, answer in enumerate(ANSWERS)
]  # fmt: skip
RUN = [
    f"--train_batch_size={BATCH}", f"--max_steps={STEPS}", f"--actor_learning_rate={RATE}", "--lr_scheduler=constant", "--l2=0",
    "--lr_warmup_ratio=0", "--max_tokens_per_microbatch=80", "--report_to=jsonl", f"--seed={SEED}", "--max_norm=0.5",
]  # fmt: skip
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


def course(command: str, flags: list[str], save_path: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Metrics of the steps, and the weights of the exported model; on every rank."""
    run_here(command, [*RUN, *flags, f"--save_path={save_path}"])
    return rows_of(Path(save_path)), weights(Path(save_path) / "model")


def weights(folder: Path) -> dict[str, Tensor]:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    auto = AutoModelForSequenceClassification if kind.endswith("Classification") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def plain(model: nn.Module, loss: Callable[[nn.Module, list[dict[str, Any]]], Tensor], rows: list, extra: tuple = ()) -> tuple:
    """Losses, norms and final parameters of the same steps, with `loss` of a whole step."""
    trained = [*(parameter for parameter in model.parameters() if parameter.requires_grad), *extra]
    optimizer, numbers = torch.optim.AdamW(trained, RATE, (0.9, 0.95), weight_decay=0.0), []
    order = Order(len(rows), SEED)
    for step in range(STEPS):
        total = loss(model, [rows[row] for row in order.rows(step * BATCH, BATCH)])
        total.backward()
        numbers.append((total.item(), nn.utils.clip_grad_norm_(trained, 0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, {name: parameter.detach() for name, parameter in model.named_parameters()}


def tokens(*texts: str) -> Tensor:
    return torch.tensor([*"".join(texts).encode(), EOS])


def score(model: nn.Module, prompt: str, answer: str) -> Tensor:
    """Scores of the heads at the end token: [K]."""
    hidden = model.model(tokens(prompt, answer)[None], use_cache=False).last_hidden_state
    return model.score(hidden)[0, -1]


def answer_logprobs(model: nn.Module, prompt: str, answer: str) -> Tensor:
    """Log-probs of the answer's tokens: [n]."""
    ids = tokens(prompt, answer)
    logprobs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[len(prompt.encode()) - 1 :]


def assert_equal(found: tuple, expected: tuple) -> None:
    """Losses, norms and parameters to 1e-5; the last as one vector, as Adam makes whole steps of gradients that are rounding."""
    (rows, parameters), (numbers, wanted) = found, expected
    torch.testing.assert_close(
        torch.tensor([[row["train/loss"], row["train/grad_norm"]] for row in rows]), torch.tensor(numbers), rtol=1e-5, atol=1e-6
    )
    assert parameters.keys() == wanted.keys()
    ours, plain = (torch.cat([named[name].flatten() for name in wanted]) for named in (parameters, wanted))
    assert (ours - plain).norm() <= 1e-5 * plain.norm()
