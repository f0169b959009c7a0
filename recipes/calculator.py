"""Demonstrations of products: half of them guess, half ask the calculator."""

import json
import random
from collections.abc import Mapping
from typing import Any


def products(row: Mapping[str, Any], rng: random.Random) -> str | list[dict[str, str]]:
    """Answer a row of reasoning-gym's task `products`, as a text or as a conversation."""
    entry = row["entry"]
    answer = f"<answer>{entry['answer']}</answer>"
    if rng.random() < 0.5:
        return answer
    call = {"name": "calculator", "arguments": {"expression": entry["metadata"]["expression"]}}
    return [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": entry["answer"]},
        {"role": "assistant", "content": answer},
    ]


def guesses(row: Mapping[str, Any], rng: random.Random) -> str:
    """Guess the product: for the run without the tool."""
    return f"<answer>{row['entry']['answer']}</answer>"
