"""The agent of recipes/smollm2_agent.yaml, which asks the model by OpenAI's own client, and its demonstrations."""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

# The chat template shows the model no tools. The recipe has the same text as queries.system, for the demonstrations.
SYSTEM = "You may ask a calculator, as in: <tool_call>{...}</tool_call>"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


async def solve(row: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
    """Return 1 where the last number that the model says is the product, else 0."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            tools: list[Any] = [CALCULATOR]
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=48)
            message = reply.choices[0].message
            if not message.tool_calls:
                numbers = re.findall(r"\d+", (message.content or "").replace(",", ""))
                return float(numbers[-1:] == [row["entry"]["answer"]])
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _product(call.function.arguments)})


def demonstrate(row: Mapping[str, Any], rng: random.Random) -> list[dict[str, str]]:
    """Ask the calculator, in a third of the cases, or else guess."""
    answer = row["entry"]["answer"]
    if rng.random() < 2 / 3:
        return [{"role": "assistant", "content": str(int(answer) + rng.choice([-100, -10, 10, 100]))}]
    call = {"name": "calculator", "arguments": {"expression": row["entry"]["metadata"]["expression"]}}
    return [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def _product(arguments: str) -> str:
    found = re.fullmatch(r"(\d{1,4}) ?\* ?(\d{1,4})", str(json.loads(arguments).get("expression")))
    return str(int(found[1]) * int(found[2])) if found else "error: an expression is a product, such as 12 * 13"
