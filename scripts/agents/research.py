"""Answer a question from documents, as an agent that speaks OpenAI's Responses.

The row has the columns `prompt`, the question; `documents`, a list of texts; and `label`, the right
answer. The server keeps the conversation: each request sends only what is new.

lightrft train_ppo ... --apply_chat_template --reward environment \\
    --agent scripts/agents/research.py:answer
"""

import json
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 6
SEARCH = {
    "type": "function",
    "name": "search",
    "description": "Return the document that has most words of a query.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}


def search(documents: list[str], query: str) -> str:
    """Return the document with the most words of a query; the first one of several."""
    words = set(query.lower().split())
    return max(documents, key=lambda text: len(words & set(text.lower().split())), default="")


async def answer(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Search until the model answers; return 1 if the answer contains the label."""
    given: Any = row["prompt"]
    previous = None
    for _ in range(MAX_TURNS):
        response = await client.responses.create(
            model="policy", input=given, tools=[SEARCH], previous_response_id=previous
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return float(row["label"].lower() in response.output_text.lower())

        previous = response.id
        given = [
            {
                "type": "function_call_output",
                "call_id": each.call_id,
                "output": search(
                    row["documents"], str(json.loads(each.arguments).get("query", ""))
                ),
            }
            for each in calls
        ]
    return 0.0
