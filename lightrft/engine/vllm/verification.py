"""Verify drafts in vLLM, with the same noise as without drafts.

The sampler draws the token of each position as it would without a draft. A drafted token is
accepted if it is the one drawn, so drafts change no sample. It is accepted with the probability
that it has, as in rejection sampling of a single guess (Leviathan et al., arXiv 2211.17192).
vLLM's own rejection samplers accept as often, but draw other numbers. The one of runner V1 also
computes with memory that it has not set, without Triton: `expand_batch_to_tokens` of version 0.32
writes its result into a copy.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from lightrft.engine.vllm.on_cpu import copy_of

NO_TOKEN = -1


class Verifier:
    """Replacement for the rejection sampler of runner V1."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling: SamplingMetadata,
    ) -> SamplerOutput:
        """Return the accepted tokens of each draft and the one after them: [R, D + 1].

        They are padded with NO_TOKEN and have log-probs. `logits` [sum(drafted + 1), V] has the
        positions of each request one after another. Each position is sampled only for requests
        whose drafts were right so far, so a request's generator advances by one draw for each token
        of the response.
        """
        if not metadata.max_spec_len:
            return self.sampler(logits=logits, sampling_metadata=sampling)

        counts = metadata.num_draft_tokens
        drafts = [draft.tolist() for draft in metadata.draft_token_ids.cpu().split(counts)]
        begins = list(accumulate(counts, lambda begin, count: begin + count + 1, initial=0))
        running = list(range(len(counts)))

        indices: list[Tensor] = []
        outputs: list[SamplerOutput] = []
        for position in range(metadata.max_spec_len + 1):
            rows = torch.tensor([begins[row] + position for row in running], device=logits.device)
            output = self.sampler(
                logits=logits[rows], sampling_metadata=_of_requests(sampling, running)
            )
            indices.append(
                torch.tensor(
                    [row * (metadata.max_spec_len + 1) + position for row in running],
                    device=logits.device,
                )
            )
            outputs.append(output)
            sampled = output.sampled_token_ids[:, 0].tolist()
            running = [
                row
                for row, token in zip(running, sampled, strict=True)
                if drafts[row][position : position + 1] == [token]
            ]

            if not running:
                break

        return _padded(outputs, torch.cat(indices), (len(counts), metadata.max_spec_len + 1))


class VerifierOfV2(RejectionSampler):
    """Replacement for the rejection sampler of runner V2.

    The noise of runner V2 is a function of seed and position, so all positions are sampled at once.
    """

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return processed logits [N, V], tokens [R, D + 1], and how many of them to keep [R].

        The logits of request r are rows cu_num_logits[r] to cu_num_logits[r + 1]. The draft for the
        token of a row is the input of the next row, except in the last row of a request.
        """
        drawn, processed = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )

        ends = cu_num_logits[1:]
        rows = torch.arange(len(drawn), device=ends.device)
        requests = torch.searchsorted(ends, rows, right=True)
        accepted = (drawn == verify_draft_sampled.roll(-1)) & (rows + 1 < ends[requests])

        shape = len(ends), self.num_speculative_steps + 1
        tokens = drawn.new_zeros(shape)
        tokens[requests, expanded_local_pos] = drawn
        kept = torch.zeros(shape, dtype=torch.int32, device=ends.device)
        kept[requests, expanded_local_pos] = accepted.int()

        return processed, tokens, 1 + kept.cumprod(1).sum(1, dtype=torch.int32)


def with_the_noise_of_samples(drafter: Any, sampler: Sampler) -> None:
    """Make a drafter with a model sample with the noise that the response's next tokens will have.

    A draft is right where the two distributions and the same noise lead to the same token. Equal
    distributions always do.
    """
    propose = drafter.propose

    def propose_ahead(*args: Any, sampling_metadata: SamplingMetadata, **options: Any) -> Tensor:
        generators = {
            row: copy_of(generator) for row, generator in sampling_metadata.generators.items()
        }
        return propose(
            *args, sampling_metadata=replace(sampling_metadata, generators=generators), **options
        )

    def sample(hidden_states: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, None]:
        logits = drafter.model.compute_logits(hidden_states)
        sampling = _of_requests(replace(sampling, max_num_logprobs=None), range(len(logits)))
        output = sampler(logits=logits, sampling_metadata=sampling)
        return output.sampled_token_ids[:, 0].long(), None

    drafter.propose = propose_ahead
    drafter._sample_draft_tokens = sample


def _of_requests(sampling: SamplingMetadata, rows: Sequence[int]) -> SamplingMetadata:
    """Return the parameters of these requests.

    Penalties are not supported, and neither are banned words of several tokens.
    """

    def of(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[torch.tensor(rows, device=values.device)]

    def of_rows(entries: dict[int, Any]) -> dict[int, Any]:
        return {index: entries[row] for index, row in enumerate(rows) if row in entries}

    return replace(
        sampling,
        temperature=of(sampling.temperature),
        top_p=of(sampling.top_p),
        top_k=of(sampling.top_k),
        allowed_token_ids_mask=of(sampling.allowed_token_ids_mask),
        generators=of_rows(sampling.generators),
        bad_words_token_ids=of_rows(sampling.bad_words_token_ids),
        output_token_ids=[[]] * len(rows),
        spec_token_ids=None,
    )


def _padded(outputs: list[SamplerOutput], indices: Tensor, shape: tuple[int, int]) -> SamplerOutput:
    """Write sampled tokens and log-probs at `indices` in the flattened `shape`."""

    def joined(tensors: Sequence[Tensor], empty: int) -> Tensor:
        values = torch.cat(list(tensors))
        padded = values.new_full((shape[0] * shape[1], *values.shape[1:]), empty)
        padded[indices] = values
        return padded

    logprobs = [output.logprobs_tensors for output in outputs]
    tokens = joined([output.sampled_token_ids for output in outputs], NO_TOKEN).view(shape)
    if logprobs[0] is None:
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
    columns = zip(*(each[:3] for each in logprobs), strict=True)
    return SamplerOutput(
        sampled_token_ids=tokens,
        logprobs_tensors=LogprobsTensors(*(joined(column, 0) for column in columns)),
    )
