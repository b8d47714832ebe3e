"""Measure what the digests of a run cost: their share of a step, and the bytes of a line.

    python scripts/bench/digests.py
    python scripts/bench/digests.py --hidden 512 --layers 8 --length 64

A run of GRPO on one process, with a random model; time inside the digests is counted. The last line
is one JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from lightrft.app.quickstart.inputs import VOCAB_SIZE, byte_tokenizer  # noqa: E402
from lightrft.app.run.digests import FILE, Digests  # noqa: E402
from lightrft.app.run.prepare import prepare_config  # noqa: E402
from lightrft.app.trainer.build import ppo_trainer  # noqa: E402
from lightrft.config import parse  # noqa: E402
from lightrft.strategy import get_strategy  # noqa: E402
from lightrft.strategy.backends.optim import BitSums  # noqa: E402
from scripts.bench.harness import parser_of  # noqa: E402

FLAGS = {
    "--hidden": (256, "width of the model"),
    "--layers": (4, "layers of the model"),
    "--length": (32, "tokens of a response"),
    "--prompts": (16, "prompts of a step, with 8 samples each"),
    "--steps": (5, "steps; the first does not count"),
}


def write_inputs(folder: Path, hidden: int, layers: int) -> int:
    """Write a random model and prompts; return the number of parameters."""
    tokenizer = byte_tokenizer(())
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"input": f"{row} = ", "label": str(row)}) + "\n" for row in range(256)]
    (folder / "train.jsonl").write_text("".join(rows))
    return model.num_parameters()


def counted(spent: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function; each call adds its seconds to the last number in `spent`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        spent[-1] += time.perf_counter() - began
        return result

    return call


def main(argv: list[str] | None = None) -> None:
    args = parser_of(__doc__, FLAGS).parse_args(argv)
    torch.set_num_threads(1)
    in_digests = [0.0]
    steps: list[float] = []
    # Patched before an optimizer is followed; the weights before the first step are not counted.
    for cls, name in ((BitSums, "_add"), (Digests, "write")):
        setattr(cls, name, counted(in_digests, getattr(cls, name)))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write_inputs(folder, args.hidden, args.layers)
        flags = [
            *("--fsdp", f"--pretrain={folder}/model", f"--prompt_data={folder}/train.jsonl"),
            *("--reward=exact_match", "--engine_type=hf", "--report_to=jsonl", "--num_episodes=9"),
            *(f"--rollout_batch_size={args.prompts}", "--n_samples_per_prompt=8"),
            *(f"--train_batch_size={8 * args.prompts}", f"--generate_max_len={args.length}"),
            *(f"--max_steps={args.steps}", f"--save_path={folder}/run", "--trace_steps=0"),
        ]
        config = prepare_config("train_ppo", parse(flags, "train_ppo"))
        strategy = get_strategy(config)
        strategy.setup_distributed()
        trainer = ppo_trainer(config, strategy)
        step = trainer.step

        def timed(number: int) -> Any:
            in_digests.append(0.0)
            began = time.perf_counter()
            record = step(number)
            steps.append(time.perf_counter() - began)
            return record

        trainer.step = timed
        trainer.fit()
        strategy.close()
        lines = (folder / "run" / FILE).read_text().splitlines()

    shares = [spent / whole for spent, whole in zip(in_digests[2:], steps[1:], strict=True)]
    result = {
        "parameters": parameters,
        "step_s": round(statistics.median(steps[1:]), 3),
        "digests_ms": round(1000 * statistics.median(in_digests[2:]), 2),
        "share": round(statistics.median(shares), 5),
        "bytes": max(map(len, lines)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
