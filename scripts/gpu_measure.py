"""The measurements of scripts/gpu_check.py.

Each runs in a process of its own and prints its figures as one JSON line.

    python scripts/gpu_measure.py NAME --device cuda

On a CPU the sizes are tiny: it then shows that a measurement works, and what does not depend on the
device is as it will be.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from scripts.gpu_first import FIRST  # noqa: E402  after its folder

GB = 1e9
MODEL_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
"""Sizes of a qwen2 for a CPU."""
TINY_EXPERTS = MODEL_TINY | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 32,
}
"""The same for qwen3_moe."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Setting:
    device: torch.device
    ranks: int
    """Processes of measurements with several of them."""

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    def shape(self, name: str, layers: int = 0) -> PretrainedConfig:
        """Return the configuration of a released model, or of a tiny one on a CPU.

        `layers` is the number of its layers, if given.
        """
        from transformers import AutoConfig

        from lightrft.extras.tools.shapes import known_config
        from lightrft.extras.tools.step_memory import with_layers

        config = known_config(name)
        if self.tiny:
            sizes = TINY_EXPERTS if config.model_type == "qwen3_moe" else MODEL_TINY
            return AutoConfig.for_model(config.model_type, **sizes)
        return with_layers(config, layers) if layers else config


# -- one device: kernels


def head_error(setting: Setting) -> Figures:
    from models.test_logprobs import errors_against_float64

    return errors_against_float64(
        setting.device, *((64, 128, 500) if setting.tiny else (512, 1024, 20_000))
    )


def head(setting: Setting) -> Figures:
    """Measure forward and backward of the log-probs, with the benchmark's own processes."""
    cases, tokens = (
        (["2000x16", "2000x32"], 256) if setting.tiny else (["151936x1536", "151936x3584"], 16_384)
    )
    command = [
        ROOT / "scripts" / "bench" / "logprobs.py",
        "--cases",
        *cases,
        "--tokens",
        str(tokens),
        "--repeat",
        "3",
        "--device",
        setting.device.type,
        "--variants",
        "lightrft",
        "full_logits",
    ]
    rows = [json.loads(line) for line in python(*command).splitlines()][:-1]
    own_rows = [row for row in rows if row["variant"] == "lightrft"]
    figures = {}

    for place, row in zip(("H 1,536", "H 3,584"), own_rows, strict=True):
        figures |= {
            f"{place}: ms": 1000 * row["seconds"],
            f"{place}: peak GB": row["peak_mb"] / 1000,
        }

    return figures


def ahead_overlap(setting: Setting) -> Figures:
    """Measure how much of a copy from pinned memory is hidden behind matrix products.

    The products take as long as the copy.
    """
    from lightrft.models.parallel.device import ahead, synchronize

    device = setting.device
    count = 4 if setting.tiny else 40
    size, width = (2**18, 64) if setting.tiny else (2**28, 8192)
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=not setting.tiny)
    matrix = torch.zeros(width, width, device=device, dtype=torch.bfloat16)

    def copies() -> Iterator[list[tuple[str, Tensor]]]:
        for _ in range(count):
            yield [("", source.to(device, non_blocking=True))]

    def taken() -> Iterator[list[tuple[str, Tensor]]]:
        # A host has no second stream.
        return copies() if device.type == "cpu" else ahead(copies(), device, size)

    def seconds(action: Callable[[], Any]) -> float:
        action()
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        return time.perf_counter() - began

    def products(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    copying = seconds(lambda: [None for _ in copies()])
    # products that take as long as a copy
    each = max(1, round(copying / count / (seconds(lambda: products(20)) / 20)))
    computing = seconds(lambda: products(each * count))
    both = seconds(lambda: [products(each) for _ in taken()])

    return {"share of a copy": (copying + computing - both) / min(copying, computing)}


# -- one device: training


def head_rounding(setting: Setting) -> Figures:
    """Return the mean error of log-probs whose logits are rounded to bfloat16, and of ours.

    Hidden states and head are in bfloat16, and scaled to a largest logit of about 18. The reference
    has the same factors in float64.
    """
    from lightrft.models.logits.logprobs import token_logprobs

    tokens, width, vocabulary = (64, 32, 500) if setting.tiny else (2048, 3584, 151_936)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(setting.device, torch.bfloat16)
    weight = torch.randn(vocabulary, width, generator=generator)
    weight = (weight * 4 / width**0.5).to(setting.device, torch.bfloat16)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(setting.device)

    errors = {"bfloat16 logits": [], "float32 logits": []}
    for rows in torch.arange(tokens).split(64):
        exact = (hidden[rows].double() @ weight.double().T).log_softmax(1)
        places = targets[rows, None]
        rounded = (hidden[rows] @ weight.T).float().log_softmax(1)
        found, _ = token_logprobs(hidden[rows], weight, targets[rows])
        reference = exact.gather(1, places)[:, 0]
        errors["bfloat16 logits"].append(rounded.gather(1, places)[:, 0] - reference)
        errors["float32 logits"].append(found - reference)

    return {name: torch.cat(each).abs().mean().item() for name, each in errors.items()}


RESERVED = "reserved GB"
"""Figure: what the allocator takes for micro-batches, beside parameters and optimizer."""


def training(
    setting: Setting,
    recompute: str,
    kernels: str,
    model: str = "Qwen/Qwen2.5-1.5B",
    layers: str = "0",
) -> Figures:
    """Time micro-batches of 16,384 tokens under FSDP2 of one rank.

    Figures are tokens per second, share of the peak, and memory.
    """
    return train_steps(setting, setting.shape(model, int(layers)), recompute, fused_kernels=kernels)


def deterministic(setting: Setting) -> Figures:
    """Compare training with --deterministic and without, in this order in one process."""
    shape = setting.shape("Qwen/Qwen2.5-1.5B")
    free = train_steps(setting, shape, "full")
    gc.collect()
    figures = train_steps(setting, shape, "full", deterministic=True)
    return {
        "tokens/s": figures["tokens/s"],
        "of the speed without": figures["tokens/s"] / free["tokens/s"],
    }


def inputs_on_host(setting: Setting) -> Figures:
    """Compare inputs of blocks on the host with full recomputation, which keeps 1.4 GB of them.

    An input whose memory is not free while the host runs ahead counts as reserved.
    """
    shape = setting.shape("Qwen/Qwen2.5-1.5B")
    figures = train_steps(setting, shape, "offload")
    gc.collect()
    full = train_steps(setting, shape, "full")
    if RESERVED in full:
        figures["reserved GB less than full"] = full[RESERVED] - figures[RESERVED]
    return figures


def train_steps(
    setting: Setting, shape: PretrainedConfig, recompute: str, **options: Any
) -> Figures:
    from transformers import AutoModelForCausalLM

    from lightrft.core.batch import Batch, micro_batches
    from lightrft.extras.tools.step_memory import parameter_counts
    from lightrft.models.attention.flat import ATTENTION
    from lightrft.models.heads import Actor, LocalGradients, TokenLogprobs
    from lightrft.models.logits.truncation import ALL
    from lightrft.models.parallel.device import (
        memory_in_use,
        peak_memory,
        release_cached_memory,
        synchronize,
    )
    from lightrft.models.parallel.peaks import DEVICES, known_device

    policy = {"gradient_checkpointing_policy": recompute} if recompute != "no" else {}
    strategy = strategy_of(bf16=True, gradient_checkpointing=recompute != "no", **policy, **options)
    lengths = [32] * 4 if setting.tiny else [2048] * 8

    with setting.device:
        model = AutoModelForCausalLM.from_config(
            shape, attn_implementation=ATTENTION, dtype=torch.float32
        )

    actor = Actor(model)
    active = parameter_counts(shape)[1]
    optimizer = strategy.create_optimizer(actor, lr=1e-6)
    actor, optimizer = strategy.prepare((actor, optimizer))
    tokens = sum(lengths)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[torch.tensor(lengths).cumsum(0) - lengths[0]] = False
    batch = Batch(
        lengths=torch.tensor(lengths),
        input_ids=torch.randint(3, shape.vocab_size, (tokens,)),
        loss_mask=mask,
        rows=torch.arange(len(lengths)),
    )

    constant_gradients = LocalGradients(
        lambda logprobs, entropy: (torch.full_like(logprobs, -1 / tokens), None), num_sequences=0
    )
    read = TokenLogprobs(entropy=False, gradients=constant_gradients)

    def compute(count: int) -> None:
        for number, part in enumerate(
            micro_batches(batch, [list(range(len(lengths)))] * count, strategy.to_device)
        ):
            logprobs, _ = actor(part, 1.0, ALL, read)
            strategy.backward(-logprobs.sum() / tokens, actor, optimizer, last=number == count - 1)

    def step(count: int) -> None:
        compute(count)
        strategy.optimizer_step(optimizer, actor)

    step(2)
    times = []
    for count in (1, 5):  # the difference is of micro-batches alone
        synchronize(setting.device)
        began = time.perf_counter()
        step(count)
        synchronize(setting.device)
        times.append(time.perf_counter() - began)

    speed = 4 * tokens / max(times[1] - times[0], 1e-9)
    heads = shape.num_attention_heads * (
        getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    )
    # causal: half of 12 x length x width x layers
    attention = 6 * lengths[0] * shape.num_hidden_layers * heads
    figures = {"tokens/s": speed, "peak GB": peak_memory(setting.device) / GB}
    if setting.device.type != "cpu":
        release_cached_memory(setting.device)
        torch.accelerator.reset_peak_memory_stats(setting.device)
        states = memory_in_use(setting.device)
        compute(2)
        reserved = torch.accelerator.max_memory_reserved(setting.device)
        figures[RESERVED] = (reserved - states) / GB
        strategy.optimizer_step(optimizer, actor)
    name = "" if setting.tiny else known_device(torch.cuda.get_device_name(setting.device))
    if name:
        figures["share of peak"] = speed * (6 * active + attention) / DEVICES[name].flops

    if not setting.tiny:
        write_profile(
            partial(step, 1), "_".join([shape.model_type, recompute, *map(str, options.values())])
        )

    strategy.close()
    return figures


def write_profile(action: Callable[[], Any], name: str) -> None:
    """Write the operations that take longest into the folder of results."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        action()
        torch.accelerator.synchronize()
    table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40)
    folder = Path(os.environ.get("GPU_CHECK_OUT", tempfile.gettempdir()))
    (folder / f"profile_{name}.txt").write_text(table)


def gradient_memory(setting: Setting, shape: str) -> Figures:
    """Return the GB of gradients between two micro-batches on rank 0 of 8.

    The process group is torch's fake one. Gradients are reduced each time, and once.
    """
    from lightrft.extras.tools.step_memory import fake_group
    from scripts.bench import memory

    sizes = {}
    layers = 2 if setting.tiny else None
    for way, once in (("every micro-batch", False), ("once", True)):
        with fake_group(8):
            sizes[way] = (
                gradients_on_device(
                    setting, memory.shape_config("small" if setting.tiny else shape, layers), once
                )
                / GB
            )
    return sizes


def gradients_on_device(setting: Setting, shape: PretrainedConfig, once: bool) -> int:
    """Return the bytes that a backward pass leaves in the allocator."""
    from lightrft.models.parallel.device import memory_in_use, synchronize

    strategy, learner = one_rank_of_many(setting, shape, reduce_gradients_once=once)
    gc.collect()  # what is left of the model before
    before = memory_in_use(setting.device)
    hidden, logits = learner(torch.randint(0, 1000, (512,), device=setting.device))
    loss = hidden.sum() + logits.sum()
    del hidden, logits
    strategy.accumulate(loss, learner, False)
    del loss
    synchronize(setting.device)

    return memory_in_use(setting.device) - before


def gathered_experts(setting: Setting) -> Figures:
    """Return the bytes of a gathered block of experts, as a share of its bfloat16 parameters.

    Groups of 32, 256 and 1,024 ranks are torch's fake ones, so that nothing is sent.
    """
    from lightrft.extras.tools.shapes import known_config
    from lightrft.extras.tools.step_memory import fake_group, with_layers
    from lightrft.models.parallel.device import memory_in_use, synchronize
    from scripts.bench import memory

    if setting.tiny:
        shape = memory.shape_config("experts", 1)
    else:
        shape = with_layers(known_config("Qwen/Qwen3-30B-A3B"), 1)

    shares = {}
    for ranks in (32, 256, 1024):
        with fake_group(ranks):
            _, learner = one_rank_of_many(setting, shape)
            block = learner.model.get_decoder().layers[0]
            size = 2 * sum(parameter.numel() for parameter in block.parameters())
            gc.collect()
            before = memory_in_use(setting.device)
            block.unshard()
            synchronize(setting.device)
            shares[f"{ranks} ranks"] = (memory_in_use(setting.device) - before) / size
    return shares


def tensor_parallel_host(setting: Setting) -> Figures:
    """Return the host's milliseconds for a micro-batch, whole and as one of two ranks.

    The layers are narrow, so that a device waits for the host; the process group is torch's fake
    one.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightrft.extras.tools.step_memory import fake_group
    from lightrft.models.parallel.device import synchronize
    from lightrft.models.parallel.tensor_parallel import parallelize

    times = {}
    for name in ("whole", "one of two ranks"):
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2 if setting.tiny else 28,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        model = AutoModelForCausalLM.from_config(config).to(setting.device)
        with fake_group(2):
            if name != "whole":
                parallelize(model, init_device_mesh(setting.device.type, (2,)))
            passes = []
            for _ in range(3 if setting.tiny else 12):
                ids = torch.randint(0, 256, (1, 128), device=setting.device)
                began = time.process_time()
                model(ids, use_cache=False).logits.sum().backward()
                passes.append(time.process_time() - began)
                synchronize(setting.device)
        times[name] = 1000 * statistics.median(passes[1:])
    return times


def one_rank_of_many(setting: Setting, shape: PretrainedConfig, **options: Any) -> tuple[Any, Any]:
    """Return FSDP2 and a model as rank 0 of a process group has them.

    The parameters have memory and no values.
    """
    from transformers import AutoModelForCausalLM

    from lightrft.extras.tools.step_memory import LearningModel
    from lightrft.models.parallel.mesh import Mesh
    from lightrft.strategy.fsdp import FSDPStrategy

    class OneOfMany(FSDPStrategy):
        def setup_distributed(self, *_: Any, **__: Any) -> None:
            self.device = setting.device
            self._mesh = Mesh(setting.device.type)

    options |= {"fsdp": True, "bf16": True, "gradient_checkpointing": True}
    strategy = OneOfMany(
        seed=0, args=options | {"train_batch_size": 1024, "micro_train_batch_size": 1}
    )
    strategy.setup_distributed()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    # Pages that nobody touched take no memory.
    learner = LearningModel(model.to_empty(device="cpu"))
    optimizer = strategy.create_optimizer(learner, lr=1e-6)
    strategy.make_ready(learner)
    strategy.distribute(learner, optimizer)
    return strategy, learner


def offload_speed(setting: Setting) -> Figures:
    """Measure GB per second of masters and AdamW's moments to the host and back.

    The first time, host memory is made.
    """
    from transformers import AutoModelForCausalLM

    from lightrft.models.parallel.device import synchronize

    strategy = strategy_of(bf16=True)

    with setting.device:
        model = AutoModelForCausalLM.from_config(
            setting.shape("Qwen/Qwen2.5-1.5B"), dtype=torch.float32
        )

    optimizer = strategy.create_optimizer(model, lr=1e-6)
    model, optimizer = strategy.prepare((model, optimizer))
    ids = torch.ones(1, 8, dtype=torch.int64, device=setting.device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    strategy.backward(loss, model, optimizer)
    strategy.optimizer_step(optimizer, model)

    size = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    figures = {}
    for number in range(3):
        for way, actions in (
            (
                "to the host",
                (
                    partial(strategy.offload_model, model),
                    partial(strategy.maybe_offload_optimizer, optimizer),
                ),
            ),
            (
                "back",
                (
                    partial(strategy.reload_model, model),
                    partial(strategy.maybe_load_optimizer, optimizer),
                ),
            ),
        ):
            synchronize(setting.device)
            began = time.perf_counter()
            for action in actions:
                action()
            synchronize(setting.device)
            speed = size / GB / (time.perf_counter() - began)
            if number:
                figures[way] = max(speed, figures.get(way, 0.0))

    strategy.close()
    return figures


def staging_speed(setting: Setting) -> Figures:
    """Measure GB per second of a checkpoint's copy to the host, and of one into pinned memory."""
    from lightrft.models.parallel.device import synchronize
    from lightrft.strategy.backends.offload import HostCopies
    from lightrft.strategy.backends.staging import to_host

    count, size = (4, 2**16) if setting.tiny else (64, 2**25)
    tensors = {str(each): torch.ones(size, device=setting.device) for each in range(count)}

    def speed(action: Callable[[], Any]) -> float:
        synchronize(setting.device)
        began = time.perf_counter()
        kept = action()
        synchronize(setting.device)
        seconds = time.perf_counter() - began
        del kept
        return 4 * count * size / GB / seconds

    first = speed(lambda: HostCopies(tensors.values()))
    return {
        "as checkpoints do": max(speed(lambda: to_host(tensors)) for _ in range(3)),
        "pinned": max(speed(lambda: HostCopies(tensors.values())) for _ in range(3)),
        "pinned, first time": first,
    }


def contract(setting: Setting, stage: str) -> Figures:
    """Count the cases of the strategy's contract that fail.

    Numbers are compared with plain torch in float32, to a relative distance of 1e-5.
    """
    from lightrft.strategy import FSDPStrategy
    from lightrft.strategy.testing import run_contract

    if stage == "fsdp":
        results = run_contract(FSDPStrategy, fsdp=True)
    else:
        from lightrft.strategy import DeepSpeedStrategy

        results = run_contract(DeepSpeedStrategy, zero_stage=int(stage))
    for name, failure in results.items():
        if failure:
            print(f"{name}:\n{failure}", file=sys.stderr)
    return {"failed cases": sum(map(bool, results.values())), "cases": len(results)}


# -- runs of the trainer

REWARD = '''
import os, signal, time
import numpy as np
steps = []
def share_of_ascii(samples, label, **columns):
    """The share of tokens that are ASCII bytes: a third at random. In the step that the environment names the process ends."""
    np.random.rand(1 + 7 * int(os.environ.get("RANK", 0)))  # ranks differ in numpy's state afterwards
    version = samples[0].weight_versions[0]
    if version not in steps:
        steps.append(version)
    if len(steps) == int(os.environ.get("KILL_AT", 0)) and os.environ.get("RANK", "0") == os.environ.get("KILL_RANK", "0"):
        open(os.environ["KILLED"], "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]
'''


def inputs(folder: Path) -> list[str]:
    from runs import prepare

    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    (folder / "counted.py").write_text(REWARD)
    return [*flags, f"--reward={folder / 'counted.py'}:share_of_ascii"]


def ppo_flags(folder: Path, save_path: str, *more: str) -> list[str]:
    from runs import PPO

    return [*inputs(folder), *PPO, "--reward_workers=0", f"--save_path={folder / save_path}", *more]


def merging(setting: Setting) -> Figures:
    """Merge adapters of rank 16 into a bfloat16 matrix, and train such a layer on 16,384 tokens.

    The matrix is from the feed-forward of a 7B model.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear

    from lightrft.models.lora import adopt_layers
    from lightrft.models.parallel.device import synchronize
    from lightrft.models.peft import merge

    device = setting.device
    tiny = setting.tiny
    height, width, tokens = (96, 64, 32) if tiny else (18944, 3584, 16_384)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(height, width, generator=generator) * 0.02).bfloat16()
    a = torch.randn(16, width, generator=generator).bfloat16()
    b = (torch.randn(height, 16, generator=generator) * 1e-4).bfloat16()
    wanted = merge(weight, a, b, 1.0)

    parts = [tensor.to(device) for tensor in (weight, a, b)]
    found = merge(*parts, 1.0).cpu()

    model = torch.nn.Sequential(torch.nn.Linear(width, height, bias=False).requires_grad_(False))
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["0"]), model)
    (layer,) = adopt_layers(model.to(device, torch.bfloat16))
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(tokens, height, device=device, dtype=torch.bfloat16)

    def seconds(action: Callable[[], Any]) -> float:
        times = []
        for _ in range(2 if tiny else 10):
            synchronize(device)
            began = time.perf_counter()
            action()
            synchronize(device)
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    def step() -> None:
        layer(x).backward(upstream)

    merged = seconds(step)
    layer.__class__ = Linear
    return {
        "places unlike torch's": (found != wanted).float().mean().item(),
        "largest distance": (found.float() - wanted.float()).abs().max().item(),
        "ms to merge": 1000 * seconds(lambda: merge(*parts, 1.0)),
        "time of peft's layer": merged / seconds(step),
    }


def learning(setting: Setting, engine: str, *more: str) -> Figures:
    """Train by GRPO in bfloat16 with this engine, and return how much the reward rises.

    The rise is from the mean of the first three steps to the mean of the last three. An engine that
    can sleep does so between rollouts, beside the trainer on the same device.
    """
    with temporary_folder() as folder:
        steps = 6 if setting.tiny else 30
        sleep = [] if engine == "hf" else ["--enable_engine_sleep", "--engine_mem_util=0.3"]
        flags = ["--bf16", f"--engine_type={engine}", f"--max_steps={steps}", *sleep, *more]
        train(1, "train_ppo", ppo_flags(folder, "run", *flags))
        rows = metrics(folder / "run")

    rewards = [row["rollout/reward"] for row in rows]
    return {
        "rise of the reward": (sum(rewards[-3:]) - sum(rewards[:3])) / 3,
        "mismatch of log-probs": max(row["engine/logprob_mismatch"] for row in rows),
    }


def resume(setting: Setting) -> Figures:
    """Compare the metrics of a run that was killed and resumed with one that was not.

    The figure is the relative distance.
    """
    from runs import repeatable

    with temporary_folder() as folder:
        more = ("--max_steps=6", "--save_steps=2", "--lr_scheduler=cosine")
        train(1, "train_ppo", ppo_flags(folder, "whole", *more))
        flags = ppo_flags(folder, "killed", *more)
        killed = {"KILL_AT": "4", "KILLED": str(folder / "when")}
        code = train(1, "train_ppo", flags, environment=killed, check=False)[0]
        if not (folder / "when").exists() or code == 0:
            raise RuntimeError("the run ended before it was killed")
        train(1, "train_ppo", [*flags, "--load_checkpoint"])
        rows = [repeatable(metrics(folder / name)) for name in ("whole", "killed")]
    return {"relative distance of metrics": distance_of(*rows), "steps": len(rows[1])}


def distance_of(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return the largest difference of a number, relative to it where it is above 0.01."""
    if [row.keys() for row in rows] != [row.keys() for row in others]:
        raise RuntimeError("the runs reported other steps or other metrics")
    pairs = [
        (row[name], other[name]) for row, other in zip(rows, others, strict=True) for name in row
    ]
    pairs = [pair for pair in pairs if all(isinstance(value, int | float) for value in pair)]
    return max(abs(one - other) / max(abs(one), 0.01) for one, other in pairs)


# -- several devices


def layout(setting: Setting, *flags: str) -> Figures:
    """Compare losses and gradient norms of supervised training in this layout with one rank's."""
    from lightrft.app.quickstart.inputs import tiny_qwen3

    with temporary_folder() as folder:
        common = [
            *(flag for flag in inputs(folder) if not flag.startswith("--reward")),
            "--train_batch_size=16",
            "--max_steps=3",
            "--max_tokens_per_microbatch=128",
            "--learning_rate=1e-3",
            "--num_episodes=4",
        ]
        if any(flag.startswith("--ep_size") for flag in flags):
            common.append(f"--pretrain={tiny_qwen3(folder / 'experts', experts=8)}")
        numeric = [flag for flag in flags if flag == "--bf16"]
        train(1, "train_sft", [*common, *numeric, f"--save_path={folder / 'one'}"])
        train(setting.ranks, "train_sft", [*common, *flags, f"--save_path={folder / 'many'}"])
        names = ("train/loss", "train/grad_norm")
        one, many = (
            [{name: row[name] for name in names} for row in metrics(folder / run)]
            for run in ("one", "many")
        )

    return {"relative distance": distance_of(one, many)}


def death_of_a_rank(setting: Setting) -> Figures:
    """Measure the seconds from SIGKILL of the last rank to the end of all, if the log names it."""
    with temporary_folder() as folder:
        rank = str(setting.ranks - 1)
        environment = {"KILL_AT": "3", "KILL_RANK": rank, "KILLED": str(folder / "when")}
        flags = ppo_flags(folder, "run", "--max_steps=6")
        code, output = train(
            setting.ranks, "train_ppo", flags, environment=environment, check=False
        )
        ended = time.time()
        if code == 0 or not (folder / "when").exists():
            raise RuntimeError("no rank was killed")
        seconds = ended - float((folder / "when").read_text())

    return {"seconds": seconds, "named": float(f"rank {rank}" in output)}


def shared_engine(setting: Setting) -> Figures:
    """Count the steps that a run finishes with an engine cut over two ranks.

    Its rewards draw from numpy's generator, so ranks differ in numpy's state afterwards.
    """
    with temporary_folder() as folder:
        flags = [
            flag
            for flag in ppo_flags(folder, "run", "--max_steps=6")
            if not flag.startswith("--engine_type")
        ]
        more = ["--engine_type=vllm", "--engine_tp_size=2", "--engine_kv_cache_gb=0.125"]
        train(setting.ranks, "train_ppo", [*flags, *more])
        return {"steps": len(metrics(folder / "run"))}


# -- vLLM


def engine_contract(setting: Setting) -> Figures:
    """Count the cases of the engine's contract that fail.

    One engine has read a checkpoint, and the one after it awaits a stream.
    """
    from engine.contract import CASES, STREAM_ONLY_CASES, run_contract
    from tiny import tiny_model

    results: dict[str, str] = {}
    with temporary_folder() as folder:
        alone(setting)
        folders = (
            tiny_model(folder / "plain", seed=1),
            tiny_model(folder / "tied", seed=2, tie=True),
        )
        for cases in (CASES, STREAM_ONLY_CASES):
            part = run_contract("vllm", 1, cases, *folders)
            for name, failure in part.items():
                if failure:
                    print(f"{name}:\n{failure}", file=sys.stderr, flush=True)
            results |= part
    return {"failed cases": sum(map(bool, results.values())), "cases": len(results)}


def sleep_cycles(setting: Setting) -> Figures:
    """Run cycles of sleep, wake and stream.

    Figures are the memory that stays asleep, its growth, and greedy answers that change.
    """
    from lightrft.engine.base import Request, Sampling
    from lightrft.models.parallel.device import occupied_memory

    before = occupied_memory(setting.device)
    with temporary_folder() as folder:
        engine, weights = stream_engine(setting, folder, setting.shape("Qwen/Qwen2.5-1.5B"))
        weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        greedy = Sampling(temperature=0, max_tokens=8 if setting.tiny else 32)

        residual = []
        answers = []
        for version in range(3 if setting.tiny else 20):
            if version:
                engine.sleep(2)
                residual.append(occupied_memory(setting.device) - before - weight_bytes)
                engine.wake("weights")
            engine.load_weights(weights.items(), version)
            engine.wake("kv_cache")
            answers.append(
                [samples[0].token_ids for samples in engine.generate([Request([5, 6, 7])], greedy)]
            )

        engine.close()

    return {
        "GB that stay": max(residual) / GB,
        "GB of growth": (residual[-1] - residual[1]) / GB,
        "answers that change": sum(answer != answers[0] for answer in answers),
    }


def sync(setting: Setting, model: str, layers: str = "0") -> Figures:
    """Measure the seconds of load_weights() with the verification of a part, the best of five.

    The tensors are on the device.
    """
    from lightrft.models.parallel.device import synchronize

    with temporary_folder() as folder:
        engine, weights = stream_engine(setting, folder, setting.shape(model, int(layers)))
        times = []
        for version in range(6):
            synchronize(setting.device)
            began = time.perf_counter()
            engine.load_weights(weights.items(), version)
            synchronize(setting.device)
            times.append(time.perf_counter() - began)
        engine.close()
    size = sum(tensor.nbytes for tensor in weights.values())
    return {"first: s": times[0], "s": min(times[1:]), "tensors": len(weights), "GB": size / GB}


def rollout_speed(setting: Setting) -> Figures:
    """Compare the tokens per second of our loop with LLM.generate, and beside a busy thread.

    Such a thread holds the interpreter, and lets each step wait for it many times, so responses
    beside it are short.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    from lightrft.app.cli import SWITCH_INTERVAL
    from lightrft.engine.base import Request, Sampling

    sys.setswitchinterval(SWITCH_INTERVAL)  # as in a run

    count, length, short = (4, 8, 8) if setting.tiny else (512, 512, 32)
    prompts = [[5 + number % 300, 6, 7, 8] for number in range(count)]

    def busy(stop: threading.Event) -> None:
        while not stop.is_set():
            sum(range(100_000))

    with temporary_folder() as folder:
        engine, weights = stream_engine(setting, folder, setting.shape("Qwen/Qwen2.5-1.5B"))
        engine.load_weights(weights.items(), 0)
        engine.wake("kv_cache")
        plain = SamplingParams(max_tokens=length, temperature=1.0, logprobs=0, detokenize=False)

        def with_engine(length: int = length) -> int:
            outputs = engine.generate(
                [Request(prompt) for prompt in prompts], Sampling(max_tokens=length)
            )
            return sum(len(sample.token_ids) for samples in outputs for sample in samples)

        def with_vllm() -> int:
            outputs = engine._llm.generate(
                [tokens_input(prompt) for prompt in prompts], plain, use_tqdm=False
            )
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        speeds = dict.fromkeys(("engine", "LLM.generate", "short", "beside a thread"), 0.0)
        for _ in range(2):
            for name, action in (
                ("engine", with_engine),
                ("LLM.generate", with_vllm),
                ("short", partial(with_engine, short)),
                ("beside a thread", partial(with_engine, short)),
            ):
                stop = threading.Event()
                thread = threading.Thread(target=busy, args=(stop,), daemon=True)
                if name == "beside a thread":
                    thread.start()
                began = time.perf_counter()
                tokens = action()
                speeds[name] = max(speeds[name], tokens / (time.perf_counter() - began))
                stop.set()

        engine.close()

    return {
        "tokens/s": speeds["engine"],
        "of LLM.generate": speeds["engine"] / speeds["LLM.generate"],
        "beside a busy thread": speeds["beside a thread"] / speeds["short"],
    }


def stream_engine(
    setting: Setting,
    folder: Path,
    config: PretrainedConfig,
    *,
    all_tokens: bool = False,
    **flags: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """Return vLLM without weights, and random weights for it on the device.

    It samples bytes, or `all_tokens` of the vocabulary, in a folder without a tokenizer.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from lightrft.config import EngineSection
    from lightrft.engine.build import build_engine
    from tiny import byte_tokenizer

    dtype = torch.float32 if setting.tiny else torch.bfloat16
    config.dtype, config.architectures = dtype, [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    if not all_tokens:
        byte_tokenizer().save_pretrained(folder)
    section = EngineSection(engine_type="vllm", engine_kv_cache_gb=0.125, **flags)
    engine = build_engine(
        section,
        model_path=str(folder),
        dtype=dtype,
        device=setting.device,
        axis=alone(setting).engine(1),
        max_model_len=1024,
        from_stream=True,
    )
    generator = torch.Generator(setting.device).manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, device=setting.device, dtype=dtype).mul_(0.05)
        for name, shape in engine.names.shapes.items()
    }

    return engine, weights


# -- shared


def strategy_of(**options: Any) -> Any:
    from lightrft.strategy import get_strategy

    strategy = get_strategy(
        {"fsdp": True, "seed": 0, "train_batch_size": 8, "micro_train_batch_size": 1, **options}
    )
    strategy.setup_distributed()
    return strategy


def alone(setting: Setting) -> Any:
    """Return the mesh of this process by itself."""
    from lightrft.models.parallel.device import collective_backend, select_device
    from lightrft.models.parallel.mesh import Mesh

    select_device()
    if not dist.is_initialized():
        meeting = tempfile.NamedTemporaryFile(prefix="gpu_check_store", delete=False).name
        os.unlink(meeting)
        dist.init_process_group(
            collective_backend(setting.device),
            init_method=f"file://{meeting}",
            rank=0,
            world_size=1,
        )
    return Mesh.shared(setting.device.type)


def train(
    ranks: int,
    entrypoint: str,
    flags: list[str],
    *,
    environment: dict[str, str] | None = None,
    check: bool = True,
) -> tuple[int, str]:
    """Run a program of the package on so many ranks; return the exit code and all it said."""
    launcher = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    command = [sys.executable, *launcher, "-m", "lightrft", entrypoint, *flags]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | own_paths() | (environment or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    if check and run.returncode:
        raise RuntimeError(
            f"{entrypoint} on {ranks} ranks ended with {run.returncode}:\n{run.stdout[-3000:]}"
        )
    return run.returncode, run.stdout


def python(*command: Any) -> str:
    program = [sys.executable, *map(str, command)]
    run = subprocess.run(
        program, cwd=ROOT, env=os.environ | own_paths(), capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    return run.stdout


def own_paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def metrics(save_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save_path / "metrics.jsonl").read_text().splitlines()]


class temporary_folder(tempfile.TemporaryDirectory):
    def __enter__(self) -> Path:
        return Path(super().__enter__())


MEASUREMENTS: dict[str, Callable[..., Figures]] = {
    f.__name__: f
    for f in (
        head_error,
        head,
        ahead_overlap,
        training,
        deterministic,
        inputs_on_host,
        gradient_memory,
        gathered_experts,
        tensor_parallel_host,
        offload_speed,
        contract,
        merging,
        learning,
        resume,
        layout,
        death_of_a_rank,
        shared_engine,
        engine_contract,
        head_rounding,
        staging_speed,
        sleep_cycles,
        sync,
        rollout_speed,
    )
} | FIRST


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    args, options = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", 0)
    print(json.dumps(MEASUREMENTS[args.name](Setting(device, args.ranks), *options)), flush=True)


if __name__ == "__main__":
    main()
