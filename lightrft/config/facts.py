"""Collect what the rules of the configuration judge: the fields of a run, and what follows."""

import os
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from lightrft.config import sections
from lightrft.config.references import (
    EvalSource,
    eval_sources,
    report_names,
    reward_terms,
    teacher_terms,
)
from lightrft.config.values import read_object

MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of a model's configuration with the number of layers that predict several tokens."""
EXPERT_FAMILIES = tuple(
    "deepseek_v3 glm4_moe gpt_oss minimax_m2 mixtral olmoe qwen3_5_moe_text qwen3_moe".split()
)
"""Types of models whose experts --ep_size divides.

Another type whose experts transformers computes in the same way needs only an entry here, once the
tests have compared its gradients.
"""
BIASED_FAMILIES = ("deepseek_v3", "glm4_moe", "minimax_m2")
"""Those whose routers add a bias to the scores when they choose; --router_bias_rate moves it."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a model's configuration with the number of experts of a layer."""
UNSCALED = ("rope_type", "rope_theta")
"""Rope parameters of a model that does not scale positions."""


class RunFacts:
    """A configuration, the command that it is for, and the number of processes.

        run = RunFacts(config, "train_ppo", 8)
        run.tp_size, run.world_size, run.num_samples

    Every field of the configuration is an attribute. Text that cannot be read counts as empty here,
    because another rule reports it.
    """

    def __init__(self, config: sections.Config, command: str = "", world_size: int = 1):
        self.config = config
        self.command = command
        self.world_size = world_size

    def __getattr__(self, name: str) -> Any:
        if name not in sections.section_of_field():
            raise AttributeError(name)
        return getattr(getattr(self.config, sections.section_of_field()[name]), name)

    def __getitem__(self, name: str) -> Any:
        """Return an attribute for a placeholder in a message, or for a condition."""
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(name) from error

    def has(self, text: str) -> bool:
        """Return whether a flag is set, or has one of the values in a text such as `--exact`,
        `--tp_size 1` or `--engine_type hf or vllm`.

        A placeholder says nothing: `--fused_kernels {fused_kernels}` is `--fused_kernels`.
        """
        name, *values = re.sub(r" {.*}| or\b", "", text.removeprefix("--")).strip("{}").split()
        if values:
            return str(self[name]) in values
        owner = sections.section_of_field().get(name)
        return self[name] != (getattr(sections.SECTIONS[owner](), name) if owner else "")

    @property
    def engine_type(self) -> str:
        """Return the engine of this machine, if the field is auto."""
        return sections.engine_name(self.config.engine)

    @property
    def reward_models(self) -> list[str]:
        return self.reward_pretrain + self.process_reward_pretrain

    @property
    def rewards(self) -> list[str]:
        """Return the names in --reward."""
        if unreadable(reward_terms, self.reward):
            return []
        return [term.name for term in reward_terms(self.reward)]

    @property
    def trackers(self) -> list[str]:
        """Return the names in --report_to."""
        return [] if unreadable(report_names, self.report_to) else report_names(self.report_to)

    @property
    def teachers(self) -> list[tuple[str, str]]:
        """Return (label, path) for the teachers of --teacher_pretrain."""
        text = self.teacher_pretrain
        return [] if unreadable(teacher_terms, text) else teacher_terms(text)

    @property
    def eval_sets(self) -> list[EvalSource]:
        return [] if unreadable(eval_sources, self.eval_data) else eval_sources(self.eval_data)

    @property
    def media_flags(self) -> str:
        return " ".join(f"--{medium}_key" for medium in sections.media_columns(self.config.data))

    @property
    def episode_flags(self) -> str:
        """Return the flags that give responses several turns."""
        names = ("environment", "agent", "tools")
        return " ".join(f"--{name}" for name in names if getattr(self.config.environment, name))

    @property
    def shaping_flags(self) -> str:
        """Return the flags that change the reward, which remax and gdpo compare without them."""
        names = ("overlong_buffer", "reward_running_norm", "reward_group_norm", "reward_clip")
        return " ".join(f"--{name}" for name in names if self[name])

    @property
    def truncation_flags(self) -> str:
        """Return the flags that leave tokens out when a response is sampled."""
        used = {
            "--top_k": self.top_k > 0,
            "--top_p": self.top_p < 1,
            "--min_p": self.min_p > 0,
            "--min_tokens": self.min_tokens > 0,
        }
        return " ".join(flag for flag, is_used in used.items() if is_used)

    @property
    def num_samples(self) -> int:
        """Return the number of samples in one step, over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def num_training_ranks(self) -> int:
        return max(self.world_size - self.rollout_ranks, 0)

    @property
    def num_generating_ranks(self) -> int:
        return self.rollout_ranks or self.world_size

    @property
    def sequence_ranks(self) -> int:
        """Return the number of ranks that split a sequence."""
        return max(self.sp_size, self.cp_size)

    @property
    def has_positive_sizes(self) -> bool:
        """Return whether the ranks can be divided by all sizes."""
        sizes = (self.engine_tp_size, self.dp_replicate, self.tp_size, self.sp_size, self.cp_size)
        return min(*sizes, self.ep_size, self.zpg) > 0 and self.rollout_ranks >= 0

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return text_config(self.pretrain)

    @cached_property
    def heads(self) -> dict[str, int]:
        """Return the counts that --tp_size and Ulysses must divide.

        A model on the hub has none yet; they are checked when it is loaded.
        """
        heads = self.model_config.get("num_attention_heads")
        counts = {
            "attention heads": heads,
            "key-value heads": self.model_config.get("num_key_value_heads", heads),
        }
        return {name: count for name, count in counts.items() if isinstance(count, int)}

    @property
    def num_experts(self) -> int:
        """Return the number of experts of a layer; 0 for a model on the hub, and without any."""
        return next((self.model_config[name] for name in EXPERTS if name in self.model_config), 0)

    @property
    def unusual_layers(self) -> str:
        """Return the layers of the model beside attention and feed-forward; empty without any.

        A model on the hub is checked when it is loaded.
        """
        if self.num_experts:
            return "experts"
        kinds = set(self.model_config.get("layer_types") or ())
        unusual = sorted(kinds - {"full_attention", "sliding_attention"})
        return f"layers of type {', '.join(unusual)}" if unusual else ""

    @property
    def window(self) -> int | None:
        """Return the number of positions of the model.

        It is None for a model on the hub, and for one with scaled positions: the engine knows it.
        """
        rope = self.model_config.get("rope_parameters") or {}
        scaled = self.model_config.get("rope_scaling") or len(rope) > len(UNSCALED)
        positions = self.model_config.get("max_position_embeddings")
        return positions if isinstance(positions, int) and not scaled else None

    @property
    def num_mtp_layers(self) -> int | None:
        """Return the number of layers that predict several tokens.

        It is None for a model on the hub: vLLM checks it while loading.
        """
        if (content := _model_file(self.pretrain)) is None:
            return None
        configs = (content, content.get("text_config", {}))
        return max(config.get(name) or 0 for config in configs for name in MTP_LAYERS)


def unreadable(parse: Callable[[str], Any], text: str) -> str:
    """Return why `parse` cannot read a text; empty if it can."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""


def text_config(name: str) -> dict[str, Any]:
    """Return the configuration of the text part of a model in a local folder, else nothing."""
    content = _model_file(name) or {}
    return content.get("text_config", content)


def _model_file(name: str) -> dict[str, Any] | None:
    """Return the content of config.json, or None where there is no such file.

    A damaged file counts as empty: loading the model reports it.
    """
    file = Path(name).expanduser() / "config.json"
    if not name or not os.path.isfile(file):
        return None
    return read_object(file)
