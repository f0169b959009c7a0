"""A quiz of up to six sums: each answer has a reward of its own, and the policy may stop (docs/guides/tools.md).

`python recipes/quiz.py > recipes/quiz.jsonl` makes the rows: the first sum of each.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

NUM_QUESTIONS = 6
LARGEST = 19
NUM_ROWS = 3000


class Quiz:
    """Asks one sum after the other, until the policy stops."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin with the sum that the prompt asks for; it decides the others."""
        self.sums = sums_of(row["prompt"])
        self.num_asked = 1

    def step(self, text: str) -> tuple[str, float, bool]:
        """Judge an answer: 1 if it is right, -1 if it is wrong, and 0 for `stop`, which ends the quiz."""
        if text.strip() == "stop":
            return "", 0.0, True
        left, right = self.sums[self.num_asked - 1]
        reward = 1.0 if text.strip() == str(left + right) else -1.0
        if self.num_asked == NUM_QUESTIONS:
            return "", reward, True
        self.num_asked += 1
        return question(*self.sums[self.num_asked - 1]), reward, False


def question(left: int, right: int) -> str:
    """The text of a sum."""
    return f" {left} + {right} ="


def sums_of(prompt: str) -> list[tuple[int, int]]:
    """The sums of the quiz that a prompt begins, by its number."""
    rng = random.Random(prompt.partition(":")[0])
    return [(rng.randint(0, LARGEST), rng.randint(0, LARGEST)) for _ in range(NUM_QUESTIONS)]


def answers(row: Mapping[str, Any], rng: random.Random) -> str | list[dict[str, str]]:
    """Demonstrate a quiz: one answer in three is a guess, and it is stopped early or late."""
    messages = list[dict[str, str]]()
    for number, (left, right) in enumerate(sums := sums_of(row["prompt"]), 1):
        is_guess, stops = rng.random() < 1 / 3, rng.random() < 0.25
        answer = str(rng.randint(0, 2 * LARGEST) if is_guess else left + right)
        messages.append({"role": "assistant", "content": "stop" if stops else answer})
        if stops or number == NUM_QUESTIONS:
            break
        messages.append({"role": "user", "content": question(*sums[number])})
    return messages


def main() -> None:
    """Print the rows."""
    for number in range(NUM_ROWS):
        quiz = f"Quiz {number}:"
        print(json.dumps({"prompt": quiz + question(*sums_of(quiz)[0])}))


if __name__ == "__main__":
    main()
