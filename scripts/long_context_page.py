"""Plan the recipe for 131,072 tokens, and write the table of docs/layouts.md.

This needs neither the model nor a GPU.

    python scripts/long_context_page.py
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightrft.config.command_line import parse  # noqa: E402  after its folder
from lightrft.config.resolve import resolve  # noqa: E402
from lightrft.extras.tools.planning import RunPlan, plan_of  # noqa: E402
from lightrft.extras.tools.shapes import model_config  # noqa: E402
from lightrft.extras.tools.step_time import HOST_LINK  # noqa: E402
from scripts.pages import between_marks  # noqa: E402

PAGE = ROOT / "docs/layouts.md"
RECIPE = ROOT / "configs/grpo_128k_llama3.1_8b.yaml"
RANKS = 8
POLICIES = ("full", "selective", "offload")


def plan(policy: str) -> RunPlan:
    flags = ["--config", str(RECIPE), "--gradient_checkpointing_policy", policy]
    config = parse(flags, "train_ppo")
    resolve(config, "train_ppo", world_size=RANKS)
    return plan_of(config, "train_ppo", RANKS, "h100", ranks_per_node=RANKS)


def table() -> str:
    """Return the plans of the recipe with each policy of recomputation."""
    lines = [
        "| Policy | GB in training | of which activations | Largest micro-batch | Seconds of"
        " training | of a step |",
        "|---|---|---|---|---|---|",
        *(row(policy, plan(policy)) for policy in POLICIES),
    ]
    return "\n".join(lines) + "\n\n" + copies() + "\n"


def row(policy: str, of_policy: RunPlan) -> str:
    train = of_policy.phases["train"]
    cells = [
        f"`{policy}`",
        f"{sum(train.values()) / 1e9:.1f}",
        f"{train['activations'] / 1e9:.1f}",
        f"{of_policy.max_tokens:,}",
        f"{of_policy.seconds['train']:.0f}",
        f"{sum(of_policy.seconds.values()):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def copies() -> str:
    """Return a sentence about the copies of `offload`, beside the time of a block."""
    config = parse(["--config", str(RECIPE)], "train_ppo")
    text = model_config(config.model.pretrain).get_text_config()
    of_input = 2 * text.hidden_size * -(-config.train.max_tokens_per_microbatch // RANKS)
    pinned = 1 << (of_input - 1).bit_length()  # as torch allocates it
    copying = of_input / (HOST_LINK / RANKS)
    offload = plan("offload")
    rollout = config.rollout
    length = (config.data.prompt_max_len + rollout.generate_max_len) / 2
    tokens = rollout.rollout_batch_size * rollout.n_samples_per_prompt * length
    microbatches = tokens / config.train.max_tokens_per_microbatch
    # A backward pass with recomputation takes three times as long as the forward pass.
    forward = offload.seconds["train"] / microbatches / text.num_hidden_layers / 4
    return (
        f"The input of a block is {of_input / 1e6:.0f} MB on each rank, {text.num_hidden_layers} of"
        f" them {text.num_hidden_layers * pinned / 1e9:.1f} GB of pinned host memory. A copy takes"
        f" {1e3 * copying:.1f} ms if all {RANKS} devices share {HOST_LINK / 1e9:.0f} GB/s, and the"
        f" forward pass of a block {1e3 * forward:.0f} ms."
    )


def main() -> None:
    warnings.simplefilter("ignore")  # torch's about views, in traces whose results nobody uses
    PAGE.write_text(between_marks(PAGE.read_text(), "long context", table()))


if __name__ == "__main__":
    main()
