"""Compare the log-probs of engine and trainer with --router_replay and without, in bfloat16.

    python scripts/bench/router_replay.py  # the hf engine, a minute
    python scripts/bench/router_replay.py --engine vllm  # on an accelerator

A random mixture has 64 experts in each of two layers, of which a token gets four. Their scores lie
so close together that rounding decides in a fifth of all cases. It learns additions for some steps
of GRPO, once with each choice of the flag.

`mismatch` is the mean of |log p_trainer - log p_engine| over the tokens of all steps, `max` the
largest, and `changed` the share of choices, of tokens and layers, that a router would have made
otherwise.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lightrft.app.quickstart.inputs import addition_problems, tiny_qwen3, write_jsonl
from scripts.bench.harness import parser_of

FLAGS = {"--engine": "hf", "--steps": 20, "--experts": 64}


def close_calls(folder: Path, experts: int) -> None:
    """Write a mixture whose experts have scores that bfloat16 can hardly tell apart."""
    tiny_qwen3(folder, experts=experts)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.num_experts_per_tok = 4
    model.config.norm_topk_prob = True
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            common = torch.randn(1, weight.shape[1], generator=generator)
            weight.data = common + 0.02 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)


def learned(folder: Path, engine: str, steps: int, *, replay: bool) -> dict[str, float]:
    """Run GRPO in a process of its own; return means over the steps."""
    run = folder / f"replay_{replay}"
    command = [sys.executable, "-m", "lightrft", "train_ppo", "--fsdp", "--bf16"]
    command += [f"--pretrain={folder / 'model'}", f"--prompt_data={folder / 'train.jsonl'}"]
    command += [f"--engine_type={engine}", f"--max_steps={steps}", f"--save_path={run}"]
    command += ["--prompt_max_len=8", "--generate_max_len=8", "--reward=exact_match"]
    command += ["--rollout_batch_size=8", "--n_samples_per_prompt=4", "--train_batch_size=32"]
    command += ["--actor_learning_rate=1e-4", "--init_kl_coef=0", "--report_to=jsonl"]
    command += [] if engine == "hf" else ["--engine_kv_cache_gb=0.1"]
    command += ["--router_replay"] if replay else []
    subprocess.run(command, check=True, stdout=sys.stderr)

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "mismatch": fmean(row["engine/logprob_mismatch"] for row in rows),
        "max": max(row["engine/logprob_mismatch_max"] for row in rows),
        "changed": fmean(row.get("train/replay_changed", 0.0) for row in rows),
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = parser_of(__doc__, FLAGS).parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        close_calls(folder / "model", args.experts)
        write_jsonl(folder / "train.jsonl", addition_problems()[0])
        free, replayed = (
            learned(folder, args.engine, args.steps, replay=replay) for replay in (False, True)
        )
    times = free["mismatch"] / replayed["mismatch"]
    print(json.dumps({"free": free, "replayed": replayed, "times": times}))


if __name__ == "__main__":
    main()
