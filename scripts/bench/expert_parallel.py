"""Count what a rank receives in a micro-batch of Qwen3-30B-A3B, with and without --ep_size.

    python scripts/bench/expert_parallel.py            # the table in docs/benchmarks.md
    python scripts/bench/expert_parallel.py --ranks 8 --ep 2 4 8 --tokens 1024
    python scripts/bench/expert_parallel.py --load 1 --ranks 32 --ep 1 8

One layer of the real size runs forward and backward in bfloat16 under FSDP2, as rank 0 of a fake
process group, and every collective is counted. The other ranks are as if they had sent what this
one sends. Bytes of parameters and gradients do not depend on the tokens, and the visits of tokens
are in proportion to them, so few tokens are computed, and counted for --tokens. The layer counts 48
times. Embeddings and head are left out, because --ep_size does not change them.

With --load 1 rank 0 loads its float32 shards of the whole model from a folder of 61 GB of zeros,
whose files take no space, and the peak of its host memory is measured beyond the empty model.
"""

import json
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig

from lightrft.extras.tools.shapes import known_config
from lightrft.extras.tools.step_memory import FakeRankStrategy, fake_group, with_layers
from lightrft.models.empty import empty_parameters
from lightrft.models.parallel.collectives import Axis
from lightrft.models.weight_files import INDEX
from lightrft.strategy.backends.materialize import materialize
from scripts.bench.harness import parser_of, peak_of

FLAGS = {
    "--ranks": [8, 64, 256],
    "--ep": ([1, 8, 64], "values of --ep_size; larger ones than a number of ranks are left out"),
    "--tokens": 16384,
    "--load": (0, "1: measure the loading of an empty folder instead"),
}
MODEL = "Qwen/Qwen3-30B-A3B"
LAYERS = 48
COMPUTED = 256
"""Number of tokens that are computed."""
GATHER = "c10d::_allgather_base_"
EXCHANGE = "c10d::alltoall_base_"
KINDS = {GATHER: "parameters", "c10d::_reduce_scatter_base_": "gradients", EXCHANGE: "visits"}


class Traffic(TorchDispatchMode):
    """Count the bytes that each kind of collective receives from other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        name = function.name()
        if name not in KINDS:
            return result

        output, source, group = args[:3]
        whole = output if name == GATHER else source
        others = 1 - 1 / ProcessGroup.unbox(group).size()
        self.received[KINDS[name]] += whole.nbytes * others
        if name == EXCHANGE:
            output.copy_(source)
        return result


def received(ranks: int, ep: int) -> Counter[str]:
    """Return the bytes that a layer receives in one micro-batch of COMPUTED tokens."""
    shape = with_layers(known_config(MODEL), 1)
    shape.vocab_size = 1024
    torch.manual_seed(0)
    with fake_group(ranks):
        options = {"fsdp": True, "bf16": True, "ep_size": ep}
        strategy = FakeRankStrategy(seed=1, args=options)
        strategy.setup_distributed()
        with torch.device("meta"):
            model = AutoModel.from_config(shape, dtype=torch.float32)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        strategy.make_ready(model)
        strategy.distribute(model, None)

        counter = Traffic()
        with counter:
            ids = torch.randint(0, shape.vocab_size, (1, COMPUTED))
            hidden = model(input_ids=ids, use_cache=False).last_hidden_state
            hidden.float().sum().backward()

    outside = model.embed_tokens.weight.numel()
    # The embeddings are gathered once, with a reduced gradient, and are not counted.
    counter.received["parameters"] -= 2 * outside * (1 - 1 / ranks)
    counter.received["gradients"] -= 4 * outside * (1 - 1 / ranks)
    return counter.received


def empty_folder(folder: Path, shape: PretrainedConfig) -> None:
    """Write the model as published, in one sparse file of zeros for each layer."""
    shape.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    files: dict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        file = "-".join(name.split(".")[:3])
        if "experts" not in name:
            files[file][name] = parameter.shape
            continue

        prefix, _, stacked = name.rpartition(".")
        num_experts, rows, columns = parameter.shape
        several = ["gate_proj", "up_proj"] if stacked == "gate_up_proj" else ["down_proj"]
        for expert in range(num_experts):
            for part in several:
                own = torch.Size((rows // len(several), columns))
                files[file][f"{prefix}.{expert}.{part}.weight"] = own

    weight_map = {}
    for file, shapes in files.items():
        end = 0
        header: dict[str, Any] = {}
        for name, size in shapes.items():
            begin, end = end, end + 2 * size.numel()
            header[name] = {"dtype": "BF16", "shape": [*size], "data_offsets": [begin, end]}
            weight_map[name] = f"{file}.safetensors"
        text = json.dumps(header).encode()
        with open(folder / f"{file}.safetensors", "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def loaded(folder: str, ranks: int, ep: int) -> tuple[float, float]:
    """Return the bytes of rank 0's shards, and the peak of loading them."""
    with fake_group(ranks):
        strategy = FakeRankStrategy(seed=1, args={"fsdp": True, "bf16": True, "ep_size": ep})
        strategy.setup_distributed()
        with empty_parameters():
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.float32
            )
        model.name_or_path = folder
        strategy.make_ready(model)
        strategy._shard(model, strategy._divide_experts(model) if ep > 1 else [])

        alone = Axis("world", 1, 0, None)
        peak = peak_of(lambda: materialize(model, torch.device("cpu"), alone))
        shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return shards, peak


def show_loading(ranks: list[int], sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        empty_folder(Path(folder), known_config(MODEL))
        for each in ranks:
            for ep in (ep for ep in sizes if each % ep == 0):
                shards, peak = loaded(folder, each, ep)
                print(
                    f"{each} ranks, ep {ep}: {shards / 1e9:.2f} GB of shards, peak"
                    f" {peak / 1e9:.2f} GB",
                    flush=True,
                )


def main() -> None:
    args = parser_of(__doc__, FLAGS).parse_args()
    if args.load:
        show_loading(args.ranks, args.ep)
        return

    kinds = tuple(KINDS.values())
    print(f"| ranks | ep | {' | '.join(kinds)} | together | fewer |")
    print("|---" * (len(kinds) + 4) + "|")
    for ranks in args.ranks:
        plain = None
        for ep in (ep for ep in args.ep if ranks % ep == 0):
            layer = received(ranks, ep)
            layer["visits"] *= args.tokens / COMPUTED
            gigabytes = [LAYERS * layer[kind] / 1e9 for kind in kinds]
            plain = plain or sum(gigabytes)
            cells = [f"{size:.1f}" for size in (*gigabytes, sum(gigabytes))]
            ratio = f"{plain / sum(gigabytes):.1f} x"
            print(f"| {ranks} | {ep} | {' | '.join(cells)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
