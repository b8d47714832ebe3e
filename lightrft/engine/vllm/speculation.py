"""Drafter of one vLLM engine, and the measurement of the batch sizes at which drafts are verified.

Verifying a draft takes longer than a plain step, the more so the larger the batch is, and saves the steps of the accepted tokens.
So it pays below a batch size that depends on the machine, the model, and the share of drafted tokens that are accepted.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from loguru import logger
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input

from lightrft.config.sections import EngineSection
from lightrft.engine.vllm.arguments import TEXT
from lightrft.engine.vllm.text_drafter import Costs
from lightrft.engine.vllm.verification import Verifier, with_the_noise_of_samples
from lightrft.parallel.collectives import Axis
from lightrft.samples import Drafts

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batch sizes at which the cost of verification is measured; others have the cost of the next larger one."""
ROUNDS = 5
"""Number of measurements of each kind at one batch size, of which the fastest counts."""
PROMPT = [0, 0, 0, 0]
"""Prompt of the measured requests."""
ENOUGH = 64
"""Number of verified drafts after which their acceptance is known."""
PAUSE = 16
"""Number of weight streams without any draft of a model, because they did not pay, after which they are tried again."""


class Speculation:
    """Drafts of one engine, and when they are verified.

    In runner V1 samples are the same as without drafts (verification.py). Runner V2 verifies with vLLM's own rejection sampling,
    whose draws depend on a request's seed alone and follow the same distribution, but differ from those without drafts.
    """

    def __init__(self, llm: LLM, section: EngineSection, axis: Axis):
        """Set up the drafter of a started engine, and measure what its drafts cost. The ranks of the engine do it together."""
        self._engine, self._axis = llm.llm_engine, axis
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._most = section.num_draft_tokens
        self._shared = section.speculative == "group"
        self._text = self._runner.drafter if section.speculative in TEXT else None
        if not self._engine.vllm_config.use_v2_model_runner:
            self._runner.rejection_sampler = Verifier(self._runner.sampler)
            if self._text is None:
                with_the_noise_of_samples(self._runner.drafter, self._runner.sampler)
        if self._text is not None:
            self._text.batch = self._runner.input_batch
            self._runner.effective_drafter_max_model_len = 2**31  # vLLM drafts zeros for sequences near the limit
            if not self._engine.model_config.is_hybrid:  # states of recurrent layers depend on whether a step has drafts
                _plain_while(self._runner, self._text.rests)
        self._recent, self._paused = Drafts(), 0
        self._costs = Costs(self._measure())
        logger.debug("--speculative {}: a step with drafts takes longer than one without by {}", section.speculative, self._costs)
        if self._text is not None:
            self._text.costs = self._costs
        self._schedule(expected=self._most / 2)

    # -- requests

    def begin(self, name: str, group: str, num_prompt: int) -> None:
        """Note that a request was submitted, whose prompt has `num_prompt` tokens."""
        if self._text is not None:
            self._text.begin(name, group if self._shared else name, num_prompt)

    def end(self, name: str, token_ids: list[int], drafts: Drafts) -> None:
        """Note that a request has ended; `token_ids` are those of its prompt and response."""
        if self._text is not None:
            self._text.end(name, token_ids)
        self._recent = self._recent.plus(drafts)

    def renew(self) -> None:
        """Forget what was said with earlier weights, and decide anew whether a model's drafts pay. No request may be running."""
        if self._text is not None:
            self._text.clear()
        self._paused = 0 if self._recent.count else self._paused + 1
        if self._recent.count >= ENOUGH:
            self._schedule(expected=self._recent.num_accepted / self._recent.count)
            self._recent = Drafts()
        elif self._paused >= PAUSE:
            self._schedule(expected=self._most / 2)

    def _schedule(self, expected: float) -> None:
        """Set the batch sizes with drafts of a model, of which `expected` tokens are accepted in each verification."""
        if self._text is None:
            sizes = range(1, self._scheduler.max_num_running_reqs + 1)
            self._scheduler.dynamic_sd_lookup = [0] + [self._most * (self._costs.of(size) < expected) for size in sizes]
            self._paused = 0

    # -- the measurement

    def _measure(self) -> dict[int, float]:
        """Return the cost by batch size, up to one at which drafts cannot pay even if all their tokens are accepted.

        Where other programs disturb the measurement, a larger batch may seem to cost less: the larger cost is returned for both.
        """
        measured, cost = {}, 0.0
        for size in BATCH_SIZES:
            if size > self._scheduler.max_num_running_reqs or cost >= self._most:
                break
            cost = measured[size] = max(cost, *self._axis.gather(self._cost(size)))
        self._draft(None)
        return measured

    def _cost(self, size: int) -> float:
        """Return the ratio of the times of steps with drafts and without, less 1; infinite if the batch does not fit.

        Drafts are verified one step after the switch, which is therefore not timed.
        """
        limit = self._engine.model_config.max_model_len - len(PROMPT)
        names = [f"cost/{size}/{number}" for number in range(size)]
        for number, name in enumerate(names):
            parameters = SamplingParams(seed=number, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False)
            self._engine.add_request(name, tokens_input(PROMPT), parameters)
        self._draft(False)
        for _ in range(size):
            if self._scheduler.waiting:
                self._engine.step()
        fastest = {False: float("inf"), True: float("inf")}
        for _ in range(ROUNDS):
            for drafts in fastest:
                self._draft(drafts)
                self._engine.step()
                begin = perf_counter()
                self._engine.step()
                seconds = perf_counter() - begin
                if len(self._scheduler.running) == size:
                    fastest[drafts] = min(fastest[drafts], seconds)
        self._engine.abort_request(names)
        return fastest[True] / fastest[False] - 1 if max(fastest.values()) < float("inf") else float("inf")

    def _draft(self, always: bool | None) -> None:
        """Draft in every step, or in none; None: where it pays."""
        if self._text is not None:
            self._text.forced = always
        else:
            self._scheduler.dynamic_sd_lookup = [self._most * bool(always)] * (self._scheduler.max_num_running_reqs + 1)


def _plain_while(runner: Any, rests: Callable[[], bool]) -> None:
    """Make vLLM's runner compute steps that neither verify drafts nor need new ones as it does without speculation.

    Its preparations of drafts take time even where there are none.
    """
    config, execute = runner.speculative_config, runner.execute_model

    def execute_model(scheduled: Any, *args: Any, **options: Any) -> Any:
        plain = rests() and not scheduled.scheduled_spec_decode_tokens
        runner.speculative_config = None if plain else config
        if plain:
            runner._draft_token_req_ids = None  # the drafts that vLLM would take up after this step
        return execute(scheduled, *args, **options)

    runner.execute_model = execute_model
