"""Episodes whose turns are written in the test instead of sampled."""

import time

from lightrft.config.sections import DataSection, EnvironmentSection
from lightrft.core.samples import Completion, Prompt, Sample
from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.episodes import Episodes
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.tool_calls import hermes
from lightrft.extras.agents.turn_format import TurnFormat
from tiny import EOS, byte_tokenizer

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% endif %}{% for"
    " message in messages %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}\n{% endfor"
    " %}{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer(chat):
    made = byte_tokenizer()
    made.chat_template = TEMPLATE if chat else None
    return made


def ids(text):
    """Return the bytes of a text as tokens, with the end token for $."""
    return [EOS if letter == "$" else ord(letter) for letter in text]


class Player:
    """Plays episodes with the turns that a test has written."""

    def __init__(
        self,
        name="",
        *,
        agent="",
        chat=False,
        longest=200,
        prompt_max_len=64,
        other_rewards="",
        refuses=False,
        recording=None,
        **limits,
    ):
        section = EnvironmentSection(environment=name, agent=agent, **limits)
        data = DataSection(apply_chat_template=chat, prompt_max_len=prompt_max_len)
        format = TurnFormat(data, tokenizer(chat), frozenset({EOS}))
        fixed = {"temperature": 1.0, "top_p": 1.0}
        served = EndpointModel(
            "tiny",
            prompt_max_len + longest,
            fixed,
            frozenset({EOS}),
            records=recording is not None,
            refuses=refuses,
        )
        setup = ProgramSetup(
            name, tuple(section.tools), agent, served, tool_seconds=section.tool_seconds
        )
        options = {"longest": longest, "other_rewards": other_rewards, "recording": recording}
        self.episodes = Episodes(setup, section, format, hermes, **options)

    def play(self, turns, *, rows=None, seconds=120.0, delay=0.0):
        """Play an episode for each list of turns at the same time, and return the samples.

        Turns are texts or token ids, and each comes after `delay` seconds.
        """
        rows = rows or [
            {"label": str(place), "prompt": "p", "end": EOS} for place in range(len(turns))
        ]
        samples = [
            Sample(Prompt(place, "p", ids("p"), row), 0, [], [], "", "")
            for place, row in enumerate(rows)
        ]
        for place, sample in enumerate(samples):
            self.episodes.begin(sample, 0, place)

        ended = []
        until = time.monotonic() + seconds
        while len(ended) < len(samples):
            assert time.monotonic() < until
            asked = self.episodes.poll(0.05)
            time.sleep(delay if asked else 0.0)

            for wanted in asked:
                state = wanted.state
                turn = turns[state.sample.prompt.index][len(state.turns)]
                most = wanted.request.max_tokens
                new = (ids(turn) if isinstance(turn, str) else list(turn))[:most]
                wanted.conversation.token_ids += new
                wanted.conversation.logprobs += [-0.5] * len(new)
                reason = "length" if len(new) == most else "stop"
                text = self.episodes.format.tokenizer.decode(new, skip_special_tokens=True)
                self.episodes.generated(wanted, Completion(new, [-0.5] * len(new), reason), text)

            ended += self.episodes.take_ended()

        return samples
