"""Measure the load of the engine while tools of other episodes run.

It is compared with turns that wait for all episodes.

    python scripts/bench/episodes.py                    # docs/benchmarks.md, one minute

Episodes of several turns on one rank with vLLM and a random Qwen3; after each turn the program of
an episode sleeps, as a tool on another machine would. `free`: a turn begins as soon as its program
asks for it, as on an accelerator. `together`: the next turns begin when all episodes have asked
for theirs, as on a CPU and with --deterministic. Busy is the share of the time that the engine has
requests, begins the number of times that one or more turns began. Prints one JSON object as its
last line.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.config import EngineSection, RolloutSection
from lightrft.config.sections import DataSection, EnvironmentSection
from lightrft.core.engine import Request
from lightrft.core.groups import Group
from lightrft.core.metrics import Trace
from lightrft.core.samples import Prompt
from lightrft.engine.build import build_engine
from lightrft.engine.requests import Sampling
from lightrft.extras.agents.episodes import Episodes
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.tool_calls import hermes
from lightrft.extras.agents.turn_format import TurnFormat
from lightrft.extras.episode_sampler import EpisodeSampler
from lightrft.models.parallel.mesh import Mesh
from lightrft.strategy.shared_session import SharedSession

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lightrft.app.quickstart.inputs import byte_tokenizer
from scripts.bench.harness import parser_of

ENVIRONMENT = """
import asyncio
import random


class Sleeps:
    def reset(self, **row):
        self.turns = 0

    async def step(self, action):
        self.turns += 1
        await asyncio.sleep({seconds} * (1 + {spread} * (random.expovariate(1) - 1)))
        return "ok", 1.0, self.turns == {turns}
"""


class Counted(SharedSession):
    """A session that counts how often one or more turns begin."""

    begins = 0

    def add_local(self, requests: list[Request]) -> range:
        self.begins += bool(requests)
        return super().add_local(requests)


def main(argv: list[str] | None = None) -> None:
    flags = {
        "--episodes": 64,
        "--turns": 5,
        "--tokens": (24, "longest turn; lengths differ, as any of 16 tokens ends one"),
        "--tool_ms": (50.0, "mean of a program's time"),
        "--spread": (0.0, "0: all take this time; 1: exponentially distributed"),
        "--repeat": 3,
    }
    args = parser_of(__doc__, flags).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    print(json.dumps(result))


def measure(args: argparse.Namespace, folder: Path) -> dict:
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=264,
        max_position_embeddings=2048,
        dtype=torch.float32,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)

    (folder / "sleeps.py").write_text(
        ENVIRONMENT.format(seconds=args.tool_ms / 1000, spread=args.spread, turns=args.turns)
    )
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    mesh = Mesh("cpu")
    longest = args.turns * (args.tokens + 8)
    axis = mesh.engine(1)
    engine = build_engine(
        EngineSection(engine_type="vllm", engine_kv_cache_gb=0.5),
        model_path=str(folder),
        axis=axis,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=longest + 16,
    )

    def session(sampling: Sampling, *, shared: bool) -> SharedSession:
        return Counted(engine.open(sampling), axis, mesh.model_parallel)

    section = EnvironmentSection(
        environment=f"{folder}/sleeps.py:Sleeps",
        max_turns=args.turns,
        turn_max_len=args.tokens,
        environment_workers=args.episodes,
    )
    rollout = RolloutSection(generate_max_len=longest, stop_token_ids=list(range(16)))
    format = TurnFormat(DataSection(prompt_max_len=16), tokenizer, frozenset())
    runs_of: dict[str, list[dict[str, float]]] = {"free": [], "together": []}

    episodes = Episodes(ProgramSetup(section.environment), section, format, hermes, longest=longest)
    for repetition in range(args.repeat + 1):
        for name in runs_of:
            trace = Trace(peak_memory=int, memory_in_use=int)
            strategy = SimpleNamespace(trace=trace, engine=engine, open_generation=session)
            sampler = EpisodeSampler(
                strategy, tokenizer, rollout, episodes, together=name == "together"
            )
            loop = sampler.open(repetition)
            groups = [
                Group.begin(number, number, Prompt(number, "go", [71, 79], {}), 1)
                for number in range(args.episodes)
            ]
            trace.step()
            began = time.perf_counter()
            loop.add([(group, group.slots) for group in groups])
            complete = sum(1 for _ in loop.steps())
            seconds = time.perf_counter() - began
            assert complete == args.episodes

            tokens = sum(
                sum(sample.episode.sampled) for group in groups for sample in group.samples
            )
            if repetition:
                busy = 1 - trace.step()["time/idle_share"]
                runs_of[name].append(
                    {
                        "seconds": seconds,
                        "busy": busy,
                        "tokens": tokens,
                        "begins": loop.session.begins,
                    }
                )

    episodes.close()
    best = {name: min(runs, key=lambda run: run["seconds"]) for name, runs in runs_of.items()}
    return {**vars(args), **best, "speedup": best["together"]["seconds"] / best["free"]["seconds"]}


if __name__ == "__main__":
    main()
