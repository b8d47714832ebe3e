"""Write what docs/debugging.md shows: the outputs of the commands that find a bug in a reward.

    python scripts/debugging_page.py

trains a tiny model in a temporary folder, with the bug and without it. Everything between the marks
of the page is what the commands print. A test repeats them.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.prepare_quickstart import tiny_qwen3  # noqa: E402  after its folder

PAGE = ROOT / "docs/debugging.md"
BUG = '''count = 0
total = 0.0

def above_average(samples, **columns):
    """Reward letters, compared with the average of all responses so far."""
    global count, total
    rewards = []
    for sample in samples:
        score = sum(token < 128 for token in sample.token_ids) / len(sample.token_ids)
        count += 1
        total += score
        rewards.append(score - total / count)
    return rewards
'''
FIXED = '''def letters(samples, **columns):
    """Reward letters; --reward_running_norm_minus_mean subtracts the average of all responses."""
    return [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]
'''
FLAGS = [
    "--fsdp",
    "--pretrain=model",
    "--prompt_data=train.jsonl",
    "--prompt_max_len=8",
    "--engine_type=hf",
    "--rollout_batch_size=4",
    "--n_samples_per_prompt=4",
    "--train_batch_size=16",
    "--generate_max_len=6",
    "--max_tokens_per_microbatch=128",
    "--num_episodes=9",
    "--actor_learning_rate=3e-3",
    "--init_kl_coef=0",
    "--advantage_estimator=reinforce",
    "--report_to=jsonl",
    "--reward_workers=0",
    "--save_steps=1",
    "--max_steps=4",
]
STATE = ["--reward_running_norm", "--reward_running_norm_minus_mean"]
COMMANDS = {
    "first": "lightrft bisect runs/one runs/resumed",
    "replay": "lightrft replay step3.zip --stage reward",
    "explain": "lightrft replay step3.zip --sample 5",
    "fixed": "lightrft bisect runs/fixed runs/fixed_resumed",
}
"""Mark of the page -> command whose output stands there."""


def prepare(folder: Path) -> None:
    """Write the model, the data and the rewards."""
    tiny_qwen3(folder / "model", seed=0)
    rows = [f'{{"input": "{"abcdefgh"[: 2 + row % 5]}="}}\n' for row in range(24)]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "bug.py").write_text(BUG)
    (folder / "fixed.py").write_text(FIXED)


def runs(folder: Path) -> Iterator[list[str]]:
    """Yield the commands that the page tells of, in order."""
    for name, flags in (
        ("one", ["--reward=bug.py:above_average"]),
        ("fixed", ["--reward=fixed.py:letters", *STATE]),
    ):
        resumed = {"one": "resumed", "fixed": "fixed_resumed"}[name]
        for run, more in ((name, []), (resumed, [f"--fork_from=runs/{name}", "--at=2"])):
            dump = f"--dump_rollouts=runs/{run}/samples"
            yield ["train_ppo", *FLAGS, *flags, *more, dump, f"--save_path=runs/{run}"]
    yield ["bundle", "runs/one", "--step", "3", "--out", "step3.zip"]


def outputs(folder: Path) -> dict[str, str]:
    """Train and compare in the folder; return what each command of the page prints."""
    prepare(folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    for command in runs(folder):
        subprocess.run(["lightrft", *command], cwd=folder, check=True, env=environment)
    return {
        mark: subprocess.run(
            command.split(), cwd=folder, env=environment, capture_output=True, text=True
        ).stdout
        for mark, command in COMMANDS.items()
    }


def page(text: str, printed: dict[str, str]) -> str:
    """Return the page with the outputs between the marks."""
    blocks = {"bug": f"```python\n{BUG}```", "code": f"```python\n{FIXED}```"}
    blocks |= {
        mark: f"```\n$ {COMMANDS[mark]}\n{output.rstrip()}\n```" for mark, output in printed.items()
    }
    for mark, block in blocks.items():
        begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        text = re.sub(
            pattern, lambda _, b=begin, c=block, e=end: f"{b}\n{c}\n{e}", text, flags=re.S
        )
    return text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(page(PAGE.read_text(), outputs(Path(temporary))))
