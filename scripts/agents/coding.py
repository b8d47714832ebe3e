"""Repair a file with tools, as a coding agent that speaks Anthropic's Messages.

The row has the columns `prompt`, the task; `files`, name -> content; and `label`, what the file
`answer.txt` has to contain at the end. Tools see one temporary folder.

lightrft train_ppo ... --apply_chat_template --reward environment \\
    --agent scripts/agents/coding.py:solve
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

MAX_TURNS = 8


def tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    """Return the schema of a tool whose arguments are texts."""
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = [
    tool("list_files", "List the files of the folder."),
    tool("read_file", "Read a file.", "name"),
    tool("write_file", "Write a file.", "name", "content"),
]


def call(folder: Path, name: str, arguments: dict[str, str]) -> str:
    """Do what the model asks for; only files of the folder itself can be named."""
    if name == "list_files":
        return "\n".join(sorted(file.name for file in folder.iterdir()))
    file = folder / Path(arguments["name"]).name
    if name == "read_file":
        return file.read_text()
    file.write_text(arguments["content"])
    return "written"


async def solve(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Work until the model calls no tool; return 1 if the answer is right."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    base_url = str(client.base_url).removesuffix("/v1/")
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in (row.get("files") or {}).items():
            (folder / Path(file).name).write_text(content)

        async with AsyncAnthropic(
            base_url=base_url, api_key=client.api_key, timeout=None, max_retries=0
        ) as api:
            for _ in range(MAX_TURNS):
                reply = await api.messages.create(
                    model="policy", max_tokens=512, messages=messages, tools=TOOLS
                )
                uses = [block for block in reply.content if block.type == "tool_use"]
                if not uses:
                    break

                results = []
                for use in uses:
                    try:
                        content = call(folder, use.name, use.input)
                    except (OSError, KeyError, TypeError, ValueError) as error:
                        content = f"Error: {error!r}"
                    result = {"type": "tool_result", "tool_use_id": use.id, "content": content}
                    results.append(result)
                messages += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": results},
                ]

        answer = folder / "answer.txt"
        return float(answer.exists() and answer.read_text().strip() == row["label"])
