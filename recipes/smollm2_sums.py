"""Sums in words for recipes/smollm2_sums.yaml: questions, and the reward.

python recipes/smollm2_sums.py   # writes smollm2_sums.jsonl and smollm2_sums_transfer.jsonl, the same bytes each time
"""

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

WORDINGS = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "Tom has {a} apples and gets {b} more. How many apples does he have now?",
)
OTHER_WORDINGS = (
    "Please compute the sum of {a} and {b}.",
    "A bus carries {a} people. At a stop {b} people get on. How many people are on the bus?",
)


def main() -> None:
    """Write the sums of numbers up to 19, and those of larger numbers in other words, which training never sees."""
    _write("smollm2_sums.jsonl", WORDINGS, range(1, 20))
    _write("smollm2_sums_transfer.jsonl", OTHER_WORDINGS, range(20, 40, 2))


def last_number(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Return 1 for each response whose last number is the sum, else 0."""
    numbers = [re.findall(r"\d+", text.replace(",", "")) for text in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


def worked(row: Mapping[str, str], rng: random.Random) -> str:
    """Return the sum written out, for a cold start."""
    first, second = re.findall(r"\d+", row["prompt"])
    return f"{first} + {second} = {row['answer']}"


def _write(name: str, wordings: Sequence[str], numbers: Iterable[int]) -> None:
    numbers = list(numbers)
    rows = [(a, b, wording) for a in numbers for b in numbers for wording in wordings]
    random.Random(0).shuffle(rows)
    lines = [json.dumps({"prompt": own.format(a=a, b=b), "answer": str(a + b)}) + "\n" for a, b, own in rows]
    Path(__file__).with_name(name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
