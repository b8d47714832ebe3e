"""From prompts to samples, with the engine that the strategy hosts."""

from transformers import PreTrainedTokenizerBase

from lightrft.config import RolloutSection
from lightrft.data.loader import share_of
from lightrft.engine.base import Sampling
from lightrft.strategy import StrategyBase
from lightrft.types import Prompt, Sample


class Sampler:
    """Samples a group of responses for each prompt; every data rank takes its consecutive part of the prompts."""

    def __init__(self, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase, section: RolloutSection):
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.section = section

    def __call__(self, prompts: list[Prompt], *, seed: int) -> list[Sample]:
        """`n_samples_per_prompt` samples for each of this rank's prompts. `prompts` are those of all ranks."""
        return self._sample(prompts, Sampling.of(self.section, seed=seed))

    def greedy(self, prompts: list[Prompt]) -> list[Sample]:
        """The most likely response to each of this rank's prompts."""
        return self._sample(prompts, Sampling.greedy(self.section))

    def _sample(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        data = self.strategy.mesh.data
        mine = share_of(data.rank, data.size, len(prompts))
        completions = self.strategy.gather_and_generate(sampling, [prompts[group].token_ids for group in mine])
        return [
            Sample(
                prompt=prompts[group],
                group=group,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                text=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
                finish_reason=completion.finish_reason,
                weight_version=completion.weight_version,
            )
            for group, completions_of_prompt in zip(mine, completions, strict=True)
            for completion in completions_of_prompt
        ]
