"""Watch a tiny model learn to add by GRPO, on this machine and without a download.

lightrft quickstart --out runs/quickstart

It makes a tokenizer, a random Qwen3 and 10,000 additions, trains on answers first, then by GRPO on
two ranks, or on the only GPU, with an engine beside the trainer, and tests the model before,
between and after. Once more into the same folder: the results of before are then in OUT.previous
and OUT/sft.previous.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from lightrft.app.cli import command_parser
from lightrft.app.quickstart.summary import conclude
from lightrft.config.tables import table

INPUTS_MODULE = "lightrft.app.quickstart.inputs"
CONFIGURATIONS = Path(__file__).parents[1] / "quickstart"
QUIET: dict[str, str] = table("app/quickstart/environment")


def main(argv: list[str] | None = None) -> None:
    options = command_parser("quickstart", __doc__).parse_args(argv)
    began = time.monotonic()
    # The program of a phase gets Ctrl-C too, writes what it has to, and ends.
    signal.signal(signal.SIGINT, lambda *_: None)

    phases = _phases(options.out, options.seed)
    for number, (title, program) in enumerate(phases.items(), 1):
        seconds = time.monotonic() - began
        sys.stdout.write(f"\n=== {seconds:4.0f} s  {number} of {len(phases)}: {title}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", *program]
        if code := subprocess.run(command, env=os.environ | QUIET).returncode:
            sys.exit(code)

    conclude(options.out, time.monotonic() - began, options.seed)


def _phases(out: Path, seed: int) -> dict[str, list[str]]:
    """Return title -> module that Python runs, with its arguments."""
    import torch  # it takes seconds, and the help does not need it

    data, warm_up = out / "data", out / "sft"
    held_out = f"--eval_data={data}/test.jsonl"
    ranks = 1 if torch.accelerator.device_count() == 1 else 2

    def train(command: str, model: Path, folder: Path, *flags: str) -> list[str]:
        return [
            *("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *("-m", "lightrft", command, f"--config={CONFIGURATIONS}/{command}.yaml"),
            *(f"--pretrain={model}", f"--prompt_data={data}/train.jsonl", f"--seed={seed}"),
            *(f"--save_path={folder}", "--overwrite", *flags),
        ]

    def test(model: Path, name: str) -> list[str]:
        """Let transformers itself answer: another program than the engine that trained."""
        return [
            *("lightrft", "evaluate", "--fsdp", "--engine_type=hf", f"--pretrain={model}"),
            *(held_out, "--generate_max_len=4", "--micro_rollout_batch_size=512"),
            *(f"--seed={seed}", f"--save_path={out}/{name}"),
        ]

    engine = "vllm" if find_spec("vllm") else "hf"
    return {
        "a tokenizer, a random Qwen3 and 10,000 problems": [INPUTS_MODULE, str(data), str(seed)],
        "what the random model can do": test(data / "model", "eval_before_sft"),
        "warm-up by supervised fine-tuning": train("train_sft", data / "model", warm_up),
        "what the warmed-up model can do": test(warm_up / "model", "eval_after_sft"),
        f"GRPO, {engine} beside the trainer": train(
            "train_ppo", warm_up / "model", out, held_out, f"--engine_type={engine}"
        ),
        "what the trained model can do": test(out / "model", "eval_after_rl"),
    }
