"""Demonstrations for recipes/calculator.yaml: half of them guess the product, half ask the calculator."""

import json
import random
from collections.abc import Mapping
from typing import Any


def products(row: Mapping[str, Any], rng: random.Random) -> str:
    """Answer a row of reasoning-gym's task `products`."""
    entry = row["entry"]
    answer = f"<answer>{entry['answer']}</answer>"
    if rng.random() < 0.5:
        return answer
    call = {"name": "calculator", "arguments": {"expression": entry["metadata"]["expression"]}}
    return f"<tool_call>{json.dumps(call)}</tool_call>\n<tool_response>\n{entry['answer']}\n</tool_response>\n{answer}"
