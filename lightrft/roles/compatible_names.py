"""Names of NVIDIA-NeMo/RL's Policy, for code that was written for it.

Each method does what the verb that it calls does.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROFILES = "profile"


class PolicyNames:
    """NeMo-RL's names of Policy's verbs. The result of train() has NeMo-RL's `all_mb_metrics`."""

    get_reference_logprobs: Callable[..., dict[str, Tensor]]
    get_top_logprobs: Callable[..., dict[str, Tensor]]
    prepare_for_logprobs: Callable[[], None]
    refit_info: Callable[[], dict[str, tuple[torch.Size, torch.dtype]]]
    start_profiling: Callable[[str | Path], None]
    stop_profiling: Callable[[], Path]

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        return self.get_reference_logprobs(data, micro_batch_size)

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        """Return `topk_logits` and `topk_indices` [B, S, k].

        The logits are normalised, so they are log-probs. Unnormalised logits differ by a constant
        at each position, so they have the same softmax.
        """
        top = self.get_top_logprobs(data, k, micro_batch_size)
        return {"topk_logits": top["top_logprobs"], "topk_indices": top["top_ids"]}

    def prepare_for_lp_inference(self) -> None:
        self.prepare_for_logprobs()

    def prepare_refit_info(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return self.refit_info()

    def start_gpu_profiling(self, folder: str | Path = PROFILES) -> None:
        self.start_profiling(folder)

    def stop_gpu_profiling(self) -> Path:
        return self.stop_profiling()


class ScorerNames:
    """NeMo-RL's names of RewardModel's verbs."""

    get_rewards: Callable[..., Tensor]

    def score(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> dict[str, Tensor]:
        """Return `scores` [B]."""
        return {"scores": self.get_rewards(data, micro_batch_size)}
