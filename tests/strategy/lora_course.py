"""Three steps of adapters by plain peft and torch, and all that a strategy does with them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn

from lightrft.config import ModelSection
from lightrft.engine.base import Sampling
from lightrft.models.lora import FACTOR_B, freeze_parameters, is_adapter
from lightrft.strategy import StrategyBase, get_strategy
from strategy.training import SHARES, load, rows, share_of_loss, snapshot, tokens_learned

LORA = {
    "lora_rank": 4,
    "lora_alpha": 4.0,
    "lora_rank_pattern": '{"down_proj": 8}',
    "lora_alpha_pattern": '{"layers.1.self_attn.q_proj": 2}',
    "rslora": True,
    "lora_init": "gaussian",
    "lora_lr_ratio": 2.0,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
RATE = 1e-2
NUM_STEPS = 3
PROMPTS = [[50, 55, 43], [49, 48]]


def adapted(folder: str, seed: int = 5, **section: Any) -> nn.Module:
    torch.manual_seed(seed)
    return freeze_parameters(load(folder), ModelSection(pretrain=folder, **LORA | section))


def peft_model(folder: str, section: dict[str, Any] = LORA) -> PeftModel:
    """peft's own, with the adapters that ours begins with."""
    targets = section["target_modules"]
    config = LoraConfig(
        r=section["lora_rank"],
        lora_alpha=section["lora_alpha"],
        rank_pattern={"down_proj": 8},
        alpha_pattern={"layers.1.self_attn.q_proj": 2},
        use_rslora=section["rslora"],
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load(folder), config)
    ours = {
        f"base_model.model.{name}": value for name, value in adapted(folder).state_dict().items()
    }
    model.load_state_dict(ours)

    return model


def plain_course(folder: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of the steps, and the merged model after them."""
    model = peft_model(folder)
    losses, norms = steps_in_torch(model)
    return losses, norms, dict(model.merge_and_unload().named_parameters())


def plain_steps(model: nn.Module) -> dict[str, Tensor]:
    """What the same steps make of any model."""
    steps_in_torch(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def steps_in_torch(model: nn.Module) -> tuple[list[float], list[float]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(model, PeftModel):
        decay = {"loraplus_weight_decay": 0.1, "loraplus_lr_ratio": LORA["lora_lr_ratio"]}
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=RATE, betas=(0.9, 0.95), **decay
        )
    else:
        groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}]
        groups += [{"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, RATE, (0.9, 0.95))

    losses = []
    norms = []
    for step in range(NUM_STEPS):
        loss = share_of_loss(model, rows(step), tokens_learned(rows(step)))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    return losses, norms


def take_step(
    made: StrategyBase, model: nn.Module, optimizer: Any, step: int
) -> tuple[float, float]:
    shares = SHARES[made.mesh.data.size]
    rank = made.mesh.data.rank
    mine = rows(step)[sum(shares[:rank]) : sum(shares[: rank + 1])]
    total = 0.0
    for last, half in ((False, mine[::2]), (True, mine[1::2])):
        loss = share_of_loss(model, half, tokens_learned(rows(step)))
        made.backward(loss, model, optimizer, last=last)
        total += loss.item()
    norm = made.optimizer_step(optimizer, model).item()
    return made.all_reduce(total, "sum"), norm


def strategy(**args: Any) -> StrategyBase:
    made = get_strategy({"seed": 1, "max_norm": 1.0, "weight_sync_bucket_mb": 1, **args})
    made.setup_distributed()
    return made


def prepared(made: StrategyBase, folder: str, **options: Any) -> tuple[nn.Module, Any]:
    model = adapted(folder, **options).train()
    return made.prepare((model, made.create_optimizer(model, RATE, weight_decay=0.1)))


def strategy_course(folder: str, args: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the steps, what the engine says, and the folders, on every rank.

    Also return how training goes on with and without an interruption.
    """
    made = strategy(
        pretrain=folder, engine_type="hf", prompt_max_len=8, generate_max_len=8, **LORA, **args
    )
    bits = {name: args[name] for name in ("bf16", "load_in_4bit") if name in args}
    model, optimizer = prepared(made, folder, **bits)
    made.setup_inference_engine(actor=model)
    before = said(made, model)
    steps = [take_step(made, model, optimizer, step) for step in range(NUM_STEPS)]
    after = said(made, model)
    merged = snapshot(made, model)
    made.save_model(model, None, out / "model", torch.float32)
    made.save_adapter(model, None, out / "adapter")
    made.save_ckpt(model, out / "checkpoints", "three")
    take_step(made, model, optimizer, NUM_STEPS)
    uninterrupted = snapshot(made, model)
    other, its_optimizer = prepared(made, folder, seed=99, **bits)
    made.load_ckpt(other, out / "checkpoints", optimizer=its_optimizer)
    loaded = snapshot(made, other)
    resumed_step = take_step(made, other, its_optimizer, NUM_STEPS)
    resumed = snapshot(made, other)
    made.close()

    return {
        "losses": [loss for loss, _ in steps],
        "norms": [norm for _, norm in steps],
        "merged": merged,
        "said": (before, after),
        "uninterrupted": uninterrupted,
        "loaded": loaded,
        "resumed": resumed,
        "resumed_step": resumed_step,
    }


def said(made: StrategyBase, model: nn.Module) -> list[tuple[list[int], list[float]]]:
    """What the engine answers with the newest weights: ids and log-probs, most likely first."""
    with made.engine_awake(model):
        completions = made.gather_and_generate(Sampling(max_tokens=6, temperature=0), PROMPTS)
    return [(sample.token_ids, sample.logprobs) for samples in completions for sample in samples]


@torch.no_grad()
def logprobs_of(model: nn.Module, prompt: list[int], token_ids: list[int]) -> list[float]:
    ids = torch.tensor(prompt + token_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].tolist()


def names_in(checkpoint: Path) -> set[str]:
    return set(dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


def disturb(model: nn.Module, seed: int = 1) -> nn.Module:
    """Adapters as if trained: B is no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(FACTOR_B):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    assert any(is_adapter(name) for name, _ in model.named_parameters())
    return model
