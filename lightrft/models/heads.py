"""Language models with the head that training needs: log-probs of given tokens instead of logits."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.models.attention import Layout
from lightrft.models.logprobs import token_logprobs
from lightrft.types import Batch


class Actor(nn.Module):
    """A causal language model whose forward gives log-probs and entropy of the batch's own tokens.

    The head's product with the hidden states happens inside, chunk by chunk, so full logits never exist.
    """

    def __init__(self, language_model: PreTrainedModel):
        super().__init__()
        self.language_model = language_model

    def forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """log p(token | the tokens before it in its sequence) at `temperature`, and the entropy there: [T] float32 each.

        Both are 0 for tokens that are not learned; the head is not even computed there.
        """
        hidden = self.language_model.base_model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            layout=Layout.of(batch.lengths, batch.input_ids.device),
        ).last_hidden_state[0]
        learned = batch.loss_mask.nonzero()[:, 0]
        weight = self.language_model.get_output_embeddings().weight
        values = token_logprobs(hidden[learned - 1], weight, batch.input_ids[learned], temperature=temperature)
        zeros = torch.zeros(batch.num_tokens, device=hidden.device)
        return tuple(zeros.index_put((learned,), value) for value in values)

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, tied ones once."""
        yield from self.language_model.named_parameters()
