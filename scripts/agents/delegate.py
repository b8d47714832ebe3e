"""Split a task between two sub-agents that work at the same time, and join their answers.

The parent and the sub-agents are the same model. Each conversation is a branch of one sample, and
all of them are learned with its reward.

lightrft train_ppo ... --apply_chat_template --reward environment \\
    --agent scripts/agents/delegate.py:solve
"""

import asyncio
from typing import Any

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, *said: str) -> str:
    """Return the answer to a conversation whose turns are given, beginning with the user's."""
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content


async def solve(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Let the model divide the task, solve both parts, and answer; return 1 if that is right."""
    task = row["prompt"]
    plan = await ask(client, task)
    first, _, second = plan.partition("\n")
    one, other = await asyncio.gather(ask(client, first), ask(client, second or task))
    last = await ask(client, task, plan, f"{one}\n{other}")
    return float(row["label"] in last)
