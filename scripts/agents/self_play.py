"""Play a word game where one model is both players.

The data gives the first letter, and the players add one letter in turn. Whoever ends a word wins
half a point, and whoever adds a letter that no word continues with loses a whole one. What one
player wins, the other loses. Each player is a role of the model, and its reward is compared with
what the same player has reached in the other games of the group: the first player has the better
position, and a common baseline would mistake that for good play.

    python scripts/prepare_quickstart.py --task guessing --out runs/guess_number/data
    torchrun --standalone --nproc-per-node 2 -m lightrft train_ppo \\
        --config configs/guess_number.yaml --environment "" \\
        --agent scripts/agents/self_play.py:play --save_path runs/self_play
"""

from itertools import cycle
from typing import Any

from openai import AsyncOpenAI

WORDS = (
    "bear bee bull calf cat crab dog dove duck foal fox frog gnat gnu goat hawk hen lion lynx mole"
    " moth oryx owl pig puma".split()
)
OPENINGS = sorted({word[0] for word in WORDS})
PLAYERS = ("first", "second")


def outcome(letters: str) -> float | None:
    """Return what the player of the last letter wins; None while the game goes on."""
    if letters in WORDS:
        return 0.5
    return None if any(word.startswith(letters) for word in WORDS) else -1.0


async def play(client: AsyncOpenAI, row: dict[str, Any]) -> dict[str, float]:
    """Play a game, and return what each player wins."""
    letters = OPENINGS[int(row["label"]) % len(OPENINGS)]
    players = cycle([PLAYERS, PLAYERS[::-1]])
    result = None
    while result is None:
        mover, other = next(players)
        reply = await client.completions.create(
            model=f"policy:{mover}", prompt=row["prompt"] + letters, max_tokens=1
        )
        letters += reply.choices[0].text or "?"
        result = outcome(letters)
    return {mover: result, other: -result}
