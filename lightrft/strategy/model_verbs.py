"""Verbs of models and optimizers: distribute them, and train."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Literal
from weakref import WeakSet

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.backends.config import Arguments, optim_section
from lightrft.backends.dropout import draw_by_data_rank
from lightrft.backends.optim import create_adamw, create_lr_scheduler, parameter_names
from lightrft.checkpoint.hf_parameters import persistent_buffers, unwrap
from lightrft.config import OptimSection
from lightrft.models.lora import merged
from lightrft.parallel.device import host_cores
from lightrft.strategy.memory_verbs import MemoryVerbs

Trained = tuple[nn.Module | None, Optimizer | None, LRScheduler | None]
_ACTORS: WeakSet[nn.Module] = WeakSet()


class ModelVerbs(MemoryVerbs):
    """Part of StrategyBase with the verbs of models and optimizers. All ranks call every verb together."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_steps = 0
        """Number of optimizer steps skipped because the gradient norm was not finite."""
        self._prepared: dict[nn.Module, Trained] = {}
        """Model -> (model, optimizer, scheduler) as passed to prepare()."""

    def init_model_context(self, device: torch.device | str | None = None) -> AbstractContextManager[None]:
        """Return a context for making a model that prepare() distributes, so that no rank's host memory ever holds it whole.

            with strategy.init_model_context():
                actor = Actor(load_model(config.model))
            actor = strategy.prepare(actor)

        Use it for models whose weights come from a Hugging Face folder. The context has no effect in a backend that does not
        support it, or with a `device` other than meta.
        """
        return nullcontext()

    def create_optimizer(
        self, model: nn.Module, lr: float, betas: Sequence[float] = (0.9, 0.95), weight_decay: float = 0.0, eps: float = 1e-8
    ) -> Optimizer:
        """Build AdamW over the parameters that require a gradient; it may be called before or after prepare()."""
        return create_adamw(model, lr, tuple(betas), weight_decay, eps)

    def create_scheduler(
        self, optimizer: Optimizer, kind: Literal["cosine", "constant"], warmup_steps: int, total_steps: int
    ) -> LRScheduler:
        """Build a schedule: linear warm-up, then a cosine to 10 % of the peak at `total_steps`, or constant."""
        return create_lr_scheduler(optimizer, kind, warmup_steps, total_steps)

    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Distribute modules in place. Each argument is a module, (module, optimizer), (module, optimizer, scheduler) or None.

        Returns its arguments: a single one as itself, several as a tuple. An existing optimizer stays the same object and trains
        the distributed parameters. With `is_rlhf` the first module that has an optimizer becomes the actor.
        """
        pairs = [(*item, None)[:3] if isinstance(item, tuple | list) else (item, None, None) for item in models_or_pairs]
        for module, optimizer, scheduler in pairs:
            if module is not None:
                self._prepare(module, optimizer, scheduler)
        if is_rlhf:
            _ACTORS.update([module for module, optimizer, _ in pairs if module is not None and optimizer is not None][:1])
        return models_or_pairs[0] if len(models_or_pairs) == 1 else models_or_pairs

    def prepare_models_and_optimizers(
        self, actor: nn.Module, critic: nn.Module | None, reward_models: Any, initial_model: nn.Module | None,
        args: Arguments, max_steps: int,
    ) -> tuple[Trained, Trained, Any, nn.Module | None]:  # fmt: skip
        """Prepare all roles of a run, with optimizers and schedules over `max_steps` optimizer steps made from `args`.

        `reward_models` is one frozen module, a list of them, or None. Returns (actor, optimizer, scheduler), the same for the
        critic (three times None without one), the reward models and the initial model as they were given.
        """
        optim = optim_section(args)
        roles = ((actor, optim.actor_learning_rate), (critic, optim.critic_learning_rate))
        trained = [self._with_optimizer(model, rate, optim, max_steps) for model, rate in roles]
        frozen = [*(reward_models if isinstance(reward_models, list | tuple) else [reward_models]), initial_model]
        self.prepare(*trained, *frozen, is_rlhf=True)
        return *trained, reward_models, initial_model

    def prepare_reward_model(self, model: nn.Module, args: Arguments, max_steps: int) -> Trained:
        """Prepare a reward model for training, with optimizer and schedule; its rate is --actor_learning_rate."""
        optim = optim_section(args)
        return self.prepare(self._with_optimizer(model, optim.actor_learning_rate, optim, max_steps))

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer | None = None, *, last: bool = True) -> None:
        """Add the gradients of one micro-batch.

        `loss` is this rank's share of the global mean: gradients are summed over ranks and micro-batches and never divided.
        They are summed over all ranks with the `last` micro-batch of an optimizer step. All ranks have the same number of
        micro-batches. A loss that is not finite makes the gradients, and thereby the norm on all ranks, not finite: see
        optimizer_step().
        """
        self._check_here(model)
        (self._unsummed.discard if last else self._unsummed.add)(model)
        share = 1 / self.mesh.sp.size if model in self.undivided else 1  # each of these ranks computes its whole loss
        self.accumulate(loss * torch.where(loss.detach().isfinite(), share, torch.nan), model, last)

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: LRScheduler | None = None, name: str = "model"
    ) -> Tensor:
        """Clip by one global norm, step, advance the schedule, clear the gradients. Returns the norm before clipping: [].

        If the norm or a loss is not finite, all ranks skip the step and the schedule, which is counted in `skipped_steps`.
        """
        if model in self._unsummed:
            raise RuntimeError(f"optimizer_step({name}) after backward(last=False): gradients were not summed over the ranks yet")
        self._check_here(optimizer, model)
        with host_cores() if self.device.type != "cpu" and self.lives_on_host(optimizer) else nullcontext():
            norm = self.take_step(model, optimizer)
        if torch.isfinite(norm):
            if scheduler is not None:
                scheduler.step()
        else:
            self.skipped_steps += 1
            if self.is_rank_0():
                logger.warning("{}: gradient norm is {}, step skipped ({} so far)", name, norm.item(), self.skipped_steps)
        self.clear_gradients(model)
        return norm

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the Hugging Face model inside a role's wrapper, or the module itself."""
        return unwrap(model)

    def full_params(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the transformers model, full tensor in `dtype`) of every parameter, tied ones once, bucket by bucket.

        Adapters are merged into their layers; persistent buffers follow, unchanged. A tensor is valid until the next one is
        requested. dtype None: bfloat16 with --bf16, else float32. An offloaded model is loaded back first.
        """
        self.reload_model(model)
        whole = unwrap(model)
        return merged(whole, chain(self.stream(model, dtype or self.dtype), persistent_buffers(whole)))

    @torch.no_grad()
    def moving_average(self, model: nn.Module, model_ema: nn.Module, beta: float = 0.992) -> None:
        """Update model_ema <- beta * model_ema + (1 - beta) * model, parameter by parameter, on each rank for its own part.

        Both must have been prepared. Do not freeze `model_ema` before prepare(), so that it keeps float32, in which small updates
        are not lost.
        """
        offloaded = [item for item in (model, model_ema) if item in self._offloaded]
        for item in offloaded:
            self.reload_model(item)
        self.lerp(model, model_ema, 1 - beta)
        for item in offloaded:
            self.offload_model(item)

    def _prepare(self, module: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
        trained = any(parameter.requires_grad for parameter in module.parameters())
        parameter_names(module, optimizer)
        self.make_ready(module)
        self.distribute(module, optimizer)
        self._know(module, optimizer)
        if trained:
            draw_by_data_rank(module, self.mesh.data, self.device)
        self._prepared[module] = (module, optimizer, scheduler)

    def _with_optimizer(self, model: nn.Module | None, rate: float, optim: OptimSection, max_steps: int) -> Trained:
        if model is None:
            return None, None, None
        optimizer = self.create_optimizer(model, rate, optim.adam_betas, optim.l2)
        warmup = round(optim.lr_warmup_ratio * max_steps)
        return model, optimizer, self.create_scheduler(optimizer, optim.lr_scheduler, warmup, max_steps)


def is_actor(model: nn.Module) -> bool:
    """Return True if prepare(is_rlhf=True) or prepare_models_and_optimizers() registered `model` as the policy of a run."""
    return model in _ACTORS
