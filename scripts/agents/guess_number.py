"""Play the game of lightrft/extras/agents/games.py as an agent.

It uses the OpenAI-compatible server of its episode.

torchrun --standalone --nproc-per-node 2 -m lightrft train_ppo --config
configs/guess_number.yaml \\
    --environment "" --agent scripts/agents/guess_number.py:play
"""

from typing import Any

from openai import AsyncOpenAI

from lightrft.extras.agents.games import GuessNumber

NUM_GUESSES = 6


async def play(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Guess until a guess is right; return the sum of the rewards of the game's steps."""
    game = GuessNumber()
    text = row["prompt"]
    total = 0.0
    game.reset(**row)

    for _ in range(NUM_GUESSES):
        reply = await client.completions.create(model="policy", prompt=text, max_tokens=1)
        guess = reply.choices[0].text
        observation, reward, done = game.step(guess)
        total += reward
        if done:
            break
        text += guess + observation

    return total
