"""Draft for one vLLM engine, and measure up to what batch size drafts pay.

A step that verifies a draft takes longer than a plain step, the more so the larger the batch is.
But it saves the steps of the accepted tokens. It therefore pays below some batch size, depending on
the machine, the model, and the share of drafted tokens that are accepted.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from loguru import logger
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input

from lightrft.config.sections import EngineSection
from lightrft.engine.vllm.text_drafter import Costs
from lightrft.engine.vllm.verification import Verifier, VerifierOfV2, with_the_noise_of_samples
from lightrft.models.parallel.collectives import Axis

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batch sizes where the cost of verification is measured; others cost as much as the next one."""
MEASUREMENTS = 5
"""How often each cost is measured at a batch size; the fastest run counts."""
WINDOW = 64
"""Verified drafts over which a model's acceptance is averaged; older ones weigh less."""
CREDIT = 2.0
"""How many plain steps a model's drafts may cost an engine before they are switched off."""
TOLERANCE = 0.005
"""Credit for each step, relative to a plain one."""


class Speculation:
    """Drafts of one engine, and when they are verified.

    Samples are the same as without drafts (verification.py).

    A model that drafts reads all tokens, also in steps that verify no drafts, so that it can go on
    from them. An account of what the drafts have saved and cost, in plain steps, decides whether
    the model is used until the next weights: see count_step().
    """

    def __init__(self, llm: LLM, section: EngineSection, axis: Axis):
        """Set up the drafter of a started engine, and measure what the drafts cost.

        The ranks of the engine do it together.
        """
        self._engine = llm.llm_engine
        self._axis = axis
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._most = section.num_draft_tokens
        self._shared = section.speculative == "group"
        speculative = self._engine.vllm_config.speculative_config
        self._text = self._runner.drafter if speculative.method == "custom_class" else None
        self._off = False
        """True while a model neither drafts nor reads. In runner V2 it still reads."""

        if self._engine.vllm_config.use_v2_model_runner:
            self._runner.rejection_sampler = VerifierOfV2(
                self._runner.sampler, speculative, self._runner.device
            )
        else:
            self._runner.rejection_sampler = Verifier(self._runner.sampler)
            if self._runner.device.type != "cpu":
                logger.warning(
                    "--speculative {}: vLLM takes its model runner V1 for these drafts, whose steps"
                    " take longer in large batches and do not overlap with scheduling. The measured"
                    " costs do not contain that; --speculative ngram or none has runner V2",
                    section.speculative,
                )
            if self._text is None:
                with_the_noise_of_samples(self._runner.drafter, self._runner.sampler)
            # States of recurrent layers depend on whether a step has drafts.
            if not self._engine.model_config.is_hybrid:
                _plain_while(
                    self._runner, self._text.skips_step if self._text else lambda: self._off
                )

        if self._text is not None:
            self._text.batch = self._runner.input_batch
            # vLLM drafts zeros for sequences near the limit.
            self._runner.effective_drafter_max_model_len = 2**31

        self._costs, self._reading = self._measure()
        logger.debug(
            "--speculative {}: a step with drafts takes longer than one without by {}",
            section.speculative,
            self._costs,
        )
        self._count = self._accepted = 1.0
        """How many drafts were verified and how many tokens in them accepted, older ones weighing
        less. At first it is a guess."""
        self._credit = CREDIT
        self._of_step = [0, 0]
        """How many drafts the last step has verified, and how many tokens in them it accepted."""

        if self._text is not None:
            self._text.costs = self._costs
        else:
            self._watch_scheduler()
            self._schedule()

    # -- requests

    def begin(self, name: str, group: str, num_prompt: int) -> None:
        """Note that a request with `num_prompt` tokens in the prompt was submitted."""
        if self._text is not None:
            self._text.begin(name, group if self._shared else name, num_prompt)

    def end(self, name: str, token_ids: list[int]) -> None:
        """Note that a request has ended; `token_ids` are prompt and response."""
        if self._text is not None:
            self._text.end(name, token_ids)

    def count_step(self) -> None:
        """Enter a step into the account of a model that drafts; switch it off without credit.

        It stays off until the next weights, because it has not read the tokens since. Steps without
        it earn credit for another try.
        """
        size = len(self._scheduler.running)
        if self._text is not None or not size:
            return

        (count, accepted), self._of_step = self._of_step, [0, 0]
        saved = accepted / size - self._costs.of(size) if count else -self._reading.of(size)
        self._credit = min(CREDIT, self._credit + TOLERANCE + (0.0 if self._off else saved))
        weight = max(0.0, 1 - count / WINDOW)
        self._count = weight * self._count + count
        self._accepted = weight * self._accepted + accepted
        self._off |= self._credit < 0
        if count or self._off:
            self._schedule()

    def renew(self) -> None:
        """Forget what was said with earlier weights, and try a model again that has earned credit.

        No request may be running.
        """
        if self._text is not None:
            self._text.clear()
        elif self._off and self._credit >= CREDIT:
            self._off = False
            self._count = self._accepted = 1.0
            self._schedule()

    def _schedule(self) -> None:
        """Set the batch sizes where drafts are verified: where they are expected to save time."""
        expected = 0.0 if self._off else self._accepted / self._count
        sizes = range(1, self._scheduler.max_num_running_reqs + 1)
        self._scheduler.dynamic_sd_lookup = [0] + [
            self._most * (self._costs.of(size) < expected) for size in sizes
        ]

    def _watch_scheduler(self) -> None:
        """Let vLLM's scheduler report each draft that was verified."""
        report = self._scheduler.make_spec_decoding_stats

        def counted(*args: Any, **options: Any) -> Any:
            self._of_step[0] += 1
            self._of_step[1] += options["num_accepted_tokens"]
            return report(*args, **options)

        self._scheduler.make_spec_decoding_stats = counted

    # -- the measurement

    def _measure(self) -> tuple[Costs, Costs]:
        """Measure what it costs to verify drafts, and to have a model only read.

        The larger cost of short and long sequences counts. Long ones are measured only where they
        share the cache of the prompt at once, and have room for the steps. The measurement stops at
        a size where drafts cannot pay. Other programs may disturb it, so that a larger batch seems
        to cost less: the larger cost is returned for both then.
        """
        model = self._engine.model_config
        shares = self._engine.vllm_config.cache_config.enable_prefix_caching and not model.is_hybrid
        lengths = [4, model.max_model_len // 2][: 1 + (shares and model.max_model_len >= 256)]
        drafts: dict[int, float] = {}
        reading: dict[int, float] = {}
        cost = least = 0.0
        for size in BATCH_SIZES:
            if size > self._scheduler.max_num_running_reqs or cost >= self._most:
                break
            measured = sum(self._axis.gather([self._cost(size, each) for each in lengths]), [])
            cost = drafts[size] = max(cost, *(each for each, _ in measured))
            if cost < float("inf"):
                least = reading[size] = max(least, *(each for _, each in measured))

        self._force(None)
        return Costs(drafts), Costs(reading)

    def _cost(self, size: int, length: int) -> tuple[float, float]:
        """Return how much longer steps with drafts, and steps where a model only reads, take.

        Both are ratios to plain steps, less 1; infinite if the batch does not fit. Drafts are
        verified one step after the switch, so that step is not timed. The prompt of `length` tokens
        repeats nothing, as text that does is the best case of a drafter.
        """
        model = self._engine.model_config
        prompt = tokens_input([token % model.get_vocab_size() for token in range(length)])
        limit = model.max_model_len - length
        names = [f"cost/{size}/{length}/{number}" for number in range(size)]
        for number, name in enumerate(names):
            parameters = SamplingParams(
                seed=number, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False
            )
            self._engine.add_request(name, prompt, parameters)

        self._force("plain")
        for _ in range(size + length // self._scheduler.max_num_scheduled_tokens):
            if not all(each.num_output_tokens for each in self._scheduler.requests.values()):
                self._engine.step()

        fastest = dict.fromkeys(
            ("plain", "reads", "drafts") if self._text is None else ("plain", "drafts"),
            float("inf"),
        )
        for _ in range(MEASUREMENTS):
            for mode in fastest:
                self._force(mode)
                self._engine.step()
                begin = perf_counter()
                self._engine.step()
                seconds = perf_counter() - begin
                if len(self._scheduler.running) == size:
                    fastest[mode] = min(fastest[mode], seconds)

        self._engine.abort_request(names)
        if max(fastest.values()) == float("inf"):
            return float("inf"), float("inf")

        return fastest["drafts"] / fastest["plain"] - 1, max(
            0.0, fastest.get("reads", 0.0) / fastest["plain"] - 1
        )

    def _force(self, mode: str | None) -> None:
        """Draft in every step, let a model only read, or do neither (`plain`); None: what pays."""
        if self._text is not None:
            self._text.forced = None if mode is None else mode == "drafts"
        else:
            self._off = mode == "plain"
            lengths = self._most * (mode == "drafts")
            self._scheduler.dynamic_sd_lookup = [lengths] * (
                self._scheduler.max_num_running_reqs + 1
            )


def _plain_while(runner: Any, skips_step: Callable[[], bool]) -> None:
    """Make vLLM's runner compute steps without drafts as it does without speculation.

    This covers steps that neither verify drafts nor need new ones. The runner's preparations of
    drafts take time even where there are none.
    """
    config = runner.speculative_config
    execute = runner.execute_model

    def execute_model(scheduled: Any, *args: Any, **options: Any) -> Any:
        plain = skips_step() and not scheduled.scheduled_spec_decode_tokens
        runner.speculative_config = None if plain else config
        if plain:
            runner._draft_token_req_ids = None  # vLLM would take up these drafts after this step
        return execute(scheduled, *args, **options)

    runner.execute_model = execute_model
