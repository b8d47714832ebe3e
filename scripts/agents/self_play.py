"""Play a word game in which one model is both players.

Players add a letter in turn. A letter that continues none of the words loses; the last letter of a
word wins. What one player wins, the other loses. Each player is a role of the model, and its reward
is compared with what the same player has reached in the other games of the group: the first player
has an advantage, and a common baseline would mistake that for good play.

    python scripts/prepare_quickstart.py --task guessing --out runs/guess_number/data
    torchrun --standalone --nproc-per-node 2 -m lightrft train_ppo \\
        --config configs/guess_number.yaml --environment "" \\
        --agent scripts/agents/self_play.py:play --save_path runs/self_play
"""

from typing import Any

from openai import AsyncOpenAI

WORDS = "ant bee cat cow cub dove duck emu fox goat hare ibis jay koala lion mole newt owl".split()
PLAYERS = ("first", "second")


def outcome(letters: str) -> float | None:
    """Return what the player of the last letter gets; None while the game goes on."""
    if letters in WORDS:
        return 1.0
    return None if any(word.startswith(letters) for word in WORDS) else -1.0


async def play(client: AsyncOpenAI, row: dict[str, Any]) -> dict[str, float]:
    """Play a game, and return what each player wins."""
    letters = ""
    result = None
    while result is None:
        mover, other = PLAYERS if len(letters) % 2 == 0 else reversed(PLAYERS)
        reply = await client.completions.create(
            model=f"policy:{mover}", prompt=row["prompt"] + letters, max_tokens=1
        )
        letters += reply.choices[0].text or "?"
        result = outcome(letters)
    return {mover: result, other: -result}
