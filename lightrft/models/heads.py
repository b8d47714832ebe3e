"""Models with the head that training needs: log-probs of given tokens instead of logits, or one number per token."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.models.attention import Layout
from lightrft.models.vocabulary import head_logprobs
from lightrft.types import Batch

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
MULTIPLIED = {"cohere", "cohere2"}
DIVIDED = {"granite", "granitemoe", "granitemoeshared"}
"""Model types whose logits are multiplied with, or divided by, their entry of SCALES."""


class Actor(nn.Module):
    """A causal language model whose forward gives log-probs and entropy of the batch's own tokens.

    The head's product with the hidden states happens inside, chunk by chunk, so full logits never exist.
    """

    def __init__(self, language_model: PreTrainedModel):
        super().__init__()
        self.language_model = language_model
        self.logit_scale = logit_scale(language_model)

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """log p(token | the tokens before it in its sequence) at `temperature`, and the entropy there: [T] float32 each.

        Both are 0 for tokens that are not learned; the head is not even computed there.
        """
        hidden = hidden_states(self.language_model, batch)
        learned = batch.loss_mask.nonzero()[:, 0]
        weight = self.language_model.get_output_embeddings().weight
        values = head_logprobs(hidden[learned - 1], weight, batch.input_ids[learned], temperature=temperature / self.logit_scale)
        zeros = torch.zeros(batch.num_tokens, device=hidden.device)
        return tuple(zeros.index_put((learned,), value) for value in values)

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, tied ones once."""
        yield from self.language_model.named_parameters()


class Scorer(nn.Module):
    """A model with one number per token: what critics and reward models are made of."""

    def __init__(self, model: PreTrainedModel):
        """ValueError unless `model` is a backbone and one linear layer with a single output."""
        super().__init__()
        heads = [name for name, child in model.named_children() if child is not model.base_model]
        linear = [name for name in heads if isinstance(getattr(model, name), nn.Linear)]
        if len(heads) != 1 or linear != heads or getattr(model, heads[0]).out_features != 1:
            raise ValueError(f"{type(model).__name__} has {', '.join(heads) or 'nothing'} above its backbone, not one number")
        self.scored_model, self.head = model, heads[0]

    def forward(self, batch: Batch) -> Tensor:
        """The head's output after each token: [T] float32, computed in float32."""
        hidden = hidden_states(self.scored_model, batch).float()
        head: nn.Linear = getattr(self.scored_model, self.head)
        return F.linear(hidden, head.weight.float(), None if head.bias is None else head.bias.float())[:, 0]

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, tied ones once."""
        yield from self.scored_model.named_parameters()


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The backbone's output after each token of its own sequence: [T, H]."""
    return model.base_model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        attention_mask=None,
        use_cache=False,
        layout=Layout.of(batch.lengths, batch.input_ids.device),
    ).last_hidden_state[0]


def logit_scale(model: PreTrainedModel) -> float:
    """What the model multiplies its logits with: 1 for most. ValueError, with the reason, where its head does something else."""
    config = model.config.get_text_config()
    problems = []
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if getattr(config, name, None) is not None:
            problems.append(f"its final logits are soft-capped ({name})")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        problems.append("its output layer has a bias")
    scaled = {name: getattr(config, name) for name in SCALES if getattr(config, name, None) is not None}
    if scaled and config.model_type not in MULTIPLIED | DIVIDED:
        problems.append(f"its logits are scaled ({', '.join(scaled)})")
    if problems:
        raise ValueError(f"{type(model).__name__} is not supported: {'; '.join(problems)}, and log-probs would be wrong")
    scale = next(iter(scaled.values()), 1.0)
    return 1 / scale if config.model_type in DIVIDED else scale
