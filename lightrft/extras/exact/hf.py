"""The embedded engine with the trainer's attention, products and log-probs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightrft.engine.base import EngineSetup
from lightrft.engine.hf import HFEngine, sample_tokens
from lightrft.engine.probe import Probe
from lightrft.extras.exact.attention import CachedRows
from lightrft.extras.exact.install import make_exact
from lightrft.extras.exact.logprobs import chunk_of, exact_logits
from lightrft.extras.exact.products import Products
from lightrft.models.heads import logit_scale, logit_softcap
from lightrft.models.logits.logprobs import logprobs_of_logits
from lightrft.models.logits.truncation import ALL, Truncation, without_padding


@dataclass(frozen=True, slots=True)
class ExactHead:
    """Head of a model with the same logits and log-probs as the trainer."""

    products: Products
    model: PreTrainedModel

    def sample(
        self, hidden: Tensor, temperature: float, uniform: Tensor, truncation: Truncation = ALL
    ) -> tuple[Tensor, Tensor]:
        """Sample as sample_tokens() does, from hidden states [R, H]."""
        weight = self.model.get_output_embeddings().weight
        size, truncation = without_padding(truncation, len(weight))
        logits = self.logits(hidden, size, temperature or 1.0)
        num = len(hidden)
        tokens, _ = sample_tokens(logits[:num], 1.0 if temperature else 0.0, uniform, truncation)

        # Rows of padding have no token, and remain so that all chunks have equal numbers of rows.
        targets = tokens.new_full((len(logits),), -100)
        targets[:num] = tokens
        chunk = chunk_of(self.products, hidden, size)
        logprobs, _ = logprobs_of_logits(logits, targets, truncation=truncation, chunk=chunk)
        return tokens, logprobs[:num]

    def logits(self, hidden: Tensor, size: int, temperature: float) -> Tensor:
        """Return logits / temperature of the first `size` tokens, with rows of padding."""
        model = self.model
        weight = model.get_output_embeddings().weight
        options = (size, temperature / logit_scale(model), logit_softcap(model))
        return exact_logits(self.products, hidden, weight, *options)

    def last_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [V] of the whole vocabulary after hidden states [1, H]."""
        return self.logits(hidden, len(self.model.get_output_embeddings().weight), 1.0)[0]


class ExactHFEngine(HFEngine):
    """Engine with the same log-probs as the trainer, bit by bit."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        products = make_exact(self.model, setup.dtype, setup.device)
        self.head = ExactHead(products, self.model)
        self.sample = self.head.sample

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache, **_: Tensor
    ) -> Tensor:
        """Return the hidden states [R, H] that the next tokens are sampled from."""
        rows = CachedRows(mask.shape[1] - mask.sum(1), mask.shape[1])
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": None}
        outputs = self.model.base_model(
            **inputs, past_key_values=cache, use_cache=True, layout=rows
        )
        return outputs.last_hidden_state[:, -1]

    @torch.inference_mode()
    def _module_outputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        ids = torch.tensor([token_ids], device=self.device)
        positions = torch.arange(len(token_ids), device=self.device)[None]
        probe = Probe(len(token_ids))
        with probe.attached(self.model):
            cache = DynamicCache(config=self.model.config)
            hidden = self._forward(ids, torch.ones_like(ids), positions, cache)

        return probe.recorded(self.head.last_logits(hidden))
