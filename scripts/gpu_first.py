"""Measurements of the part `first` of scripts/gpu_check.py: what was never seen on a GPU.

They are chosen so that the most decisive ones fit into the fifteen minutes for which somebody may
lend a machine. Each starts an engine at most once.
"""

import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from scripts.gpu_measure import Figures, Setting

PROMPTS = [[5 + number, 6, 7, 8, 9 + number % 7] for number in range(64)]
CYCLES = 5
"""How often an engine sleeps, wakes and gets other weights."""
GB = 1e9


def machine(setting: "Setting") -> "Figures":
    """Compare the CUDA of torch with the toolkit's, and count the processes on the first GPU."""
    toolkit = _answer("nvcc", "--version").partition("release ")[2].split(".")[0]
    driver = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    contexts = _answer("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
    nccl = "none" if setting.tiny else ".".join(map(str, torch.cuda.nccl.version()))
    sys.stderr.write(f"driver {driver or 'none'}, NCCL {nccl}, nvcc {toolkit or 'none'}\n")

    built_for = (torch.version.cuda or "0").split(".")[0]
    capability = (0, 0) if setting.tiny else torch.cuda.get_device_capability(setting.device)
    return {
        "capability": capability[0] + capability[1] / 10,
        "toolkit of another CUDA": float(bool(toolkit) and toolkit != built_for),
        "processes on the GPU": len(contexts.split()),
    }


def _answer(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return ""
    return subprocess.run([program, *arguments], capture_output=True, text=True).stdout.strip()


def engine(setting: "Setting") -> "Figures":
    """Let an engine sleep and wake with other weights, compare it with transformers, and close it
    while it sleeps; then start another one in the same process."""
    from scripts.gpu_measure import MODEL_TINY, stream_engine, temporary_folder

    tiny = AutoConfig.for_model("qwen3", **MODEL_TINY, head_dim=32)
    shape = tiny if setting.tiny else setting.shape("Qwen/Qwen3-1.7B", 8)
    with temporary_folder() as folder:
        figures = _cycles(setting, folder / "first", shape)
        second, weights = stream_engine(setting, folder / "second", tiny)
        second.load_weights(weights.items(), 0)
        figures["tokens of a second engine"] = len(_greedy(second, 1)[0])
        second.close()
    return figures


def engine_with_experts(setting: "Setting") -> "Figures":
    """Do the same with a mixture of experts, and compare the experts that engine and transformers
    choose for the same tokens."""
    from scripts.gpu_measure import temporary_folder

    shape = setting.shape("Qwen/Qwen3-30B-A3B", 4)
    # A CPU without Triton has the model runner that cannot say which experts were chosen.
    replay = {} if setting.tiny else {"router_replay": True}
    with temporary_folder() as folder:
        return _cycles(setting, folder, shape, **replay)


def engine_with_drafts(setting: "Setting") -> "Figures":
    """Count greedy responses that change when drafts from the text are verified, after a sleep."""
    from scripts.gpu_measure import temporary_folder

    shape = setting.shape("Qwen/Qwen2.5-1.5B", 4)
    with temporary_folder() as folder:
        return _cycles(setting, folder, shape, speculative="ngram")


def _cycles(setting: "Setting", folder: Path, shape: PretrainedConfig, **flags: Any) -> "Figures":
    """Return what an engine shows in some cycles of sleep, wake and other weights.

    The first figure is the distance of its log-probs from transformers', whose head computes in
    float32 too. Weights differ in each cycle by a factor that depends on it.
    """
    from lightrft.engine.base import Request, Sampling
    from lightrft.models.parallel.device import occupied_memory, synchronize
    from scripts.gpu_measure import stream_engine

    before = occupied_memory(setting.device)
    began = time.perf_counter()
    engine, weights = stream_engine(setting, folder, shape, all_tokens=True, **flags)
    started = time.perf_counter() - began
    model = AutoModelForCausalLM.from_config(shape, dtype=next(iter(weights.values())).dtype)
    model.to(setting.device).eval()
    length = 8 if setting.tiny else 128

    times: dict[str, list[float]] = {"asleep": [], "awake": [], "stream": []}
    figures: dict[str, float] = {"s to start": started}
    gaps, asleep = [], []

    def timed(name: str, action: Any, *arguments: Any) -> None:
        synchronize(setting.device)
        began = time.perf_counter()
        action(*arguments)
        synchronize(setting.device)
        times[name].append(time.perf_counter() - began)

    for cycle in range(2 if setting.tiny else CYCLES):
        changed = {name: weight * (1 + cycle / 8) for name, weight in weights.items()}
        model.load_state_dict(changed, strict=False)
        if cycle:
            timed("asleep", engine.sleep, 2)
            ours = [*weights.values(), *changed.values(), *model.parameters()]
            held = sum(tensor.nbytes for tensor in ours)
            asleep.append(occupied_memory(setting.device) - before - held)
            timed("awake", engine.wake, "weights")
        timed("stream", engine.load_weights, changed.items(), cycle)
        engine.wake("kv_cache")
        tokens = _greedy(engine, length)
        gaps += [
            _gap_of_best(model, prompt, found)
            for prompt, found in zip(PROMPTS, tokens, strict=True)
        ]

    requests = [Request(prompt) for prompt in PROMPTS]
    began = time.perf_counter()
    samples = [one[0] for one in engine.generate(requests, Sampling(max_tokens=length, seed=1))]
    figures["tokens/s"] = len(samples) * length / (time.perf_counter() - began)
    distances = [
        (_logprobs(model, prompt, one.token_ids) - torch.tensor(one.logprobs)).abs()
        for prompt, one in zip(PROMPTS, samples, strict=True)
    ]
    if samples[0].experts is not None:
        figures["experts that differ"] = _other_experts(model, PROMPTS[0], samples[0])

    engine.sleep(2)
    engine.close()
    return figures | {
        "mismatch of log-probs": torch.cat(distances).mean().item(),
        "worse than the best token": max(gaps),
        "GB beside the weights asleep": max(asleep) / GB,
        **{f"s {name}": min(seconds) for name, seconds in times.items()},
    }


def _greedy(engine: Any, length: int) -> list[list[int]]:
    from lightrft.engine.base import Request, Sampling

    greedy = Sampling(temperature=0, max_tokens=length)
    outputs = engine.generate([Request(prompt) for prompt in PROMPTS], greedy)
    return [samples[0].token_ids for samples in outputs]


@torch.no_grad()
def _logits(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the logits of the tokens, [tokens, vocabulary], of a head that computes in float32."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    hidden = model.base_model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
    return (hidden.float() @ model.get_output_embeddings().weight.float().T).cpu()


def _logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    logprobs = _logits(model, prompt, tokens).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def _gap_of_best(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """Return by how much the logits of greedy tokens are below the largest ones, at most."""
    logits = _logits(model, prompt, tokens)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (logits.max(-1).values - chosen).max().item()


@torch.no_grad()
def _other_experts(model: PreTrainedModel, prompt: list[int], sample: Any) -> float:
    """Return the share of chosen experts of a sample that transformers does not choose."""
    ids = torch.tensor([prompt + sample.token_ids[:-1]], device=model.device)
    routed = model(ids, output_router_logits=True).router_logits
    count = sample.experts.shape[-1]
    chosen = torch.stack([logits.topk(count).indices for logits in routed], 1).cpu()
    recorded = torch.as_tensor(sample.experts).long()
    same = (chosen[..., None] == recorded[..., None, :]).any(-1)
    return 1 - same.float().mean().item()


def divided_experts(setting: "Setting") -> "Figures":
    """Count how often the host waits for the device in a layer of divided experts, and time it."""
    from lightrft.models.parallel.device import synchronize
    from lightrft.models.parallel.expert_parallel import expert_layers, visit
    from scripts.gpu_measure import alone

    axis = alone(setting).engine(1)
    shape = setting.shape("Qwen/Qwen3-30B-A3B", 1)
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype).to(setting.device)
    (layer,) = expert_layers(model)[:1]
    tokens = 64 if setting.tiny else 16_384
    hidden = torch.randn(tokens, shape.hidden_size, device=setting.device, dtype=dtype)
    scores = torch.rand(tokens, shape.num_experts, device=setting.device)
    weights, chosen = scores.topk(shape.num_experts_per_tok)

    def step() -> None:
        visit(
            layer.forward, shape.num_experts, axis, hidden, chosen, weights.to(dtype)
        ).sum().backward()

    step()
    synchronize(setting.device)
    began = time.perf_counter()
    for _ in range(5):
        step()
    synchronize(setting.device)
    seconds = (time.perf_counter() - began) / 5

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if not setting.tiny:
            torch.cuda.set_sync_debug_mode("warn")
        step()
        if not setting.tiny:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in found if "synchronizing" in str(warning.message)]
    return {"host waits": len(waits), "ms": 1000 * seconds}


def fp8_training(setting: "Setting") -> "Figures":
    """Compare training of two layers of 7B in FP8 with bfloat16, in this order in one process."""
    from scripts.gpu_measure import train_steps

    shape = setting.shape("Qwen/Qwen2.5-7B", 2)
    fp8 = train_steps(setting, shape, "full", fp8_training=True)
    plain = train_steps(setting, shape, "full")
    return {"tokens/s": fp8["tokens/s"], "of bfloat16": fp8["tokens/s"] / plain["tokens/s"]}


def four_bits(setting: "Setting") -> "Figures":
    """Compare a matrix of 7B in four bits with the host's, and time how it is made and read."""
    from lightrft.models.four_bits.bitsandbytes import dequantize, quantize
    from lightrft.models.parallel.device import synchronize

    shape = (128, 256) if setting.tiny else (18944, 3584)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    on_host = quantize(matrix)
    on_device = matrix.to(setting.device)
    quantize(on_device)  # the first one loads the kernels
    synchronize(setting.device)
    began = time.perf_counter()
    found = quantize(on_device)
    synchronize(setting.device)
    made = time.perf_counter()
    dequantize(*found, torch.bfloat16)
    synchronize(setting.device)
    read = time.perf_counter()
    return {
        "codes unlike the host's": (found[0].cpu() != on_host[0]).float().mean().item(),
        "ms to make": 1000 * (made - began),
        "ms to read": 1000 * (read - made),
    }


FIRST = {
    "first_machine": machine,
    "first_engine": engine,
    "first_experts": engine_with_experts,
    "first_drafts": engine_with_drafts,
    "first_divided_experts": divided_experts,
    "first_fp8": fp8_training,
    "first_four_bits": four_bits,
}
"""Name for scripts/gpu_measure.py -> measurement."""
