"""Exchanges of agents with the model, in an SQLite file (--agent_record).

The table `exchanges` has a row for each request, with the reply and the tokens of the turn. Each row
is written at once, so the file of a run that was killed can be read. A resumed run writes the
episodes of the steps that it repeats in place of the earlier ones.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

from lightrft.extras.agents.episode_state import EpisodeState
from lightrft.extras.agents.messages import Exchanged

RECORDED = (
    *("draw", "prompt_group", "slot", "number", "prompt", "path", "request", "status", "reply"),
    *("branch", "role", "weights", "token_ids", "logprobs"),
)
"""Columns of the table.

draw, prompt_group, slot: seed of the step, number of the prompt's group, and index of the episode
in the group. number: index of the request in the episode. prompt: index of the prompt in the data.
path, request, status, reply: as they were sent; a stream is the text of all events. branch, role:
conversation of the turn, 0 for the first one. weights: version of the weights that sampled it. The
last five are null without a turn.
"""


class Recording:
    """The file of one rank."""

    def __init__(self, path: Path):
        """Open the file, or begin it. Raises sqlite3.Error if it is another kind of file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL"):
            self._file.execute(f"PRAGMA {pragma}")
        columns = ", ".join(RECORDED)
        self._file.execute(f"CREATE TABLE IF NOT EXISTS exchanges ({columns})")
        self._file.execute(
            "CREATE INDEX IF NOT EXISTS episodes ON exchanges (draw, prompt_group, slot)"
        )

    def add(self, draw: int, state: EpisodeState, exchange: Exchanged) -> None:
        """Write an exchange of an episode; `draw` is the seed of its step."""
        episode = (draw, *state.seed_numbers)
        if not state.num_exchanges:  # an interrupted run may have recorded the same episode
            where = "draw = ? AND prompt_group = ? AND slot = ?"
            self._file.execute(f"DELETE FROM exchanges WHERE {where}", episode)

        turn: tuple[Any, ...] = (None,) * 5
        if exchange.turn in range(len(state.turns)):
            row, token_ids, end, _ = state.turns[exchange.turn]
            begin = end - len(token_ids)
            branch = next(index for index, each in enumerate(state.sample.rows) if each is row)
            version = row.weight_versions[begin] if row.weight_versions else None
            exact = json.dumps(token_ids), json.dumps(row.logprobs[begin:end])
            turn = (branch, row.episode.role, version, *exact)

        sent = (exchange.path, exchange.request, exchange.status, exchange.reply)
        values = (*episode, state.num_exchanges, state.sample.prompt.index, *sent, *turn)
        marks = ", ".join("?" * len(values))
        self._file.execute(f"INSERT INTO exchanges VALUES ({marks})", values)
        state.num_exchanges += 1
