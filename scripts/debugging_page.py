"""Write what docs/debugging.md shows: the outputs of the commands that find two bugs.

    python scripts/debugging_page.py

trains tiny models in a temporary folder, with the bugs and without them. Everything between the
marks of the page is what the commands print. A test repeats them. The bug of vLLM needs a CPU with
instructions for bfloat16; on others its outputs stay as they are.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, NemotronHConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightrft.app.quickstart.inputs import VOCAB_SIZE, byte_tokenizer, tiny_qwen3  # noqa: E402

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
    return [
        sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples
    ]
'''
UNREPAIRED = (
    FIXED
    + """
from lightrft.engine.vllm import shim

shim._renew_copies = lambda model: None  # as if lightrft did not know of the bug
"""
)
FLAGS = [
    "--fsdp",
    "--pretrain=model",
    "--prompt_data=train.jsonl",
    "--prompt_max_len=8",
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
HF = ["--engine_type=hf"]
VLLM = ["--engine_type=vllm"]
COMMANDS = {
    "first": "lightrft bisect runs/one runs/resumed",
    "replay": "lightrft replay step3.zip --stage reward",
    "explain": "lightrft replay step3.zip --sample 5",
    "fixed": "lightrft bisect runs/fixed runs/fixed_resumed",
}
OF_ENGINES = {
    "engines": "lightrft bisect runs/hf runs/vllm",
    "repaired": "lightrft bisect runs/hf runs/repaired",
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
        ("one", [*HF, "--reward=bug.py:above_average"]),
        ("fixed", [*HF, "--reward=fixed.py:letters", *STATE]),
    ):
        resumed = {"one": "resumed", "fixed": "fixed_resumed"}[name]
        for run, more in ((name, []), (resumed, [f"--fork_from=runs/{name}", "--at=2"])):
            dump = f"--dump_rollouts=runs/{run}/samples"
            yield ["train_ppo", *FLAGS, *flags, *more, dump, f"--save_path=runs/{run}"]
    yield ["bundle", "runs/one", "--step", "3", "--out", "step3.zip"]


def outputs(folder: Path) -> dict[str, str]:
    """Train and compare in the folder; return what each command of the reward's bug prints."""
    prepare(folder)
    for command in runs(folder):
        _run(["lightrft", *command], folder).check_returncode()
    return {mark: _run(command.split(), folder).stdout for mark, command in COMMANDS.items()}


def outputs_of_engines(folder: Path) -> dict[str, str]:
    """Train with two engines; return what each command of vLLM's bug prints."""
    prepare(folder)
    tiny_nemotron(folder / "model")
    (folder / "unrepaired.py").write_text(UNREPAIRED)
    train = ["lightrft", "train_ppo", *FLAGS, "--bf16"]
    for run, flags in (
        ("hf", [*HF, "--reward=fixed.py:letters"]),
        ("vllm", [*VLLM, "--reward=unrepaired.py:letters", "--no_verify_weight_sync"]),
        ("repaired", [*VLLM, "--reward=fixed.py:letters"]),
    ):
        dump = f"--dump_rollouts=runs/{run}/samples"
        _run([*train, *flags, dump, f"--save_path=runs/{run}"], folder).check_returncode()

    verified = [*VLLM, "--reward=unrepaired.py:letters", "--save_path=runs/verified"]
    errors = _run([*train, *verified], folder).stderr
    printed = {mark: _run(command.split(), folder).stdout for mark, command in OF_ENGINES.items()}
    return printed | {"verified": re.findall("EngineError: (.*)", errors)[-1]}


def tiny_nemotron(folder: Path) -> None:
    """Save a random Nemotron-H with a layer of Mamba 2 and one of attention."""
    tokenizer = byte_tokenizer()
    config = NemotronHConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=96,
        hybrid_override_pattern="M*",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
        initializer_range=0.08,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder; what it tells while it runs goes to the terminal too."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    print(ran.stderr, end="", file=sys.stderr)
    return ran


def page(text: str, printed: dict[str, str]) -> str:
    """Return the page with the outputs between the marks."""
    blocks = {"bug": f"```python\n{BUG}```", "code": f"```python\n{FIXED}```"}
    commands = COMMANDS | OF_ENGINES
    for mark, output in printed.items():
        shown = f"$ {commands[mark]}\n" if mark in commands else ""
        blocks[mark] = f"```\n{shown}{output.rstrip()}\n```"
    for mark, block in blocks.items():
        begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        text = re.sub(
            pattern, lambda _, b=begin, c=block, e=end: f"{b}\n{c}\n{e}", text, flags=re.S
        )
    return text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        printed = outputs(Path(temporary))
    if torch.cpu._is_avx512_bf16_supported():
        with tempfile.TemporaryDirectory() as temporary:
            printed |= outputs_of_engines(Path(temporary))
    PAGE.write_text(page(PAGE.read_text(), printed))
