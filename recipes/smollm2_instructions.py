"""Instructions whose following can be verified, for recipes/smollm2_instructions.yaml: prompts, and the reward.

They are after IFEval (arXiv 2311.07911): a program, not a person, sees whether the form that was asked for is there.

python recipes/smollm2_instructions.py   # writes the two .jsonl files beside this one, the same bytes each time
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOPICS = [
    "the sea",
    "a dog",
    "winter",
    "music",
    "bread",
    "the moon",
    "a train",
    "rain",
    "a garden",
    "coffee",
    "friendship",
]
TOPICS += ["a city at night", "mountains", "a good book", "football", "the sun", "a river", "cats", "school", "cooking"]
TOPICS += ["friendship", "a birthday", "autumn leaves", "a lighthouse", "a long walk"]
OTHER_TOPICS = [
    "a snowman",
    "the desert",
    "a violin",
    "grandparents",
    "a bicycle",
    "the stars",
    "chess",
    "a market",
    "tea",
]
WORDS = ["blue", "warm", "quiet", "old", "light", "happy", "long", "cold", "sweet", "small"]
FIRSTS = ["Today", "Sometimes", "Once", "Never", "Always"]
# Each kind's instruction as training has it, and in other words.
KINDS = {
    "keyword": (
        'Write one sentence about {topic}. Include the word "{word}".',
        'Use "{word}" in a sentence on {topic}.',
    ),
    "keywords": (
        'Write a short text about {topic}. Include the words "{word}" and "{other}".',
        'Say something about {topic} in which both "{word}" and "{other}" occur.',
    ),
    "at_most": ("Describe {topic} in at most {number} words.", "What is {topic}? Use {number} words or fewer."),
    "sentences": ("Write exactly {few} sentences about {topic}.", "Tell me about {topic} in {few} sentences."),
    "no_commas": (
        "Write two or three sentences about {topic}. Do not use any commas.",
        "Without a single comma, tell me two or three things about {topic}.",
    ),
    "title": (
        "Write a title for a poem about {topic}. Put the title in double angular brackets, such as <<My Title>>.",
        "How would you call a story about {topic}? Answer in the form <<Title>>.",
    ),
    "json": (
        'Describe {topic} as JSON with the keys "name" and "color", such as {{"name": "apple", "color": "red"}}.',
        'Give a JSON object about {topic}. Its keys are "name" and "color".',
    ),
    "list": (
        "Name {few} things that belong to {topic}. Use a numbered list, such as:\n1. one thing\n2. another thing",
        "Make a numbered list of {few} things that have to do with {topic}.",
    ),
    "start": (
        'Write one sentence about {topic}. Start with the word "{first}".',
        'Begin a sentence on {topic} with the word "{first}".',
    ),
}


def main() -> None:
    """Write the instructions, and others in other words and about other things, which training never sees."""
    _write("smollm2_instructions.jsonl", TOPICS, wording=0, times=6)
    _write("smollm2_instructions_transfer.jsonl", OTHER_TOPICS, wording=1, times=1)


def follows(completions: Sequence[str], check: Sequence[dict[str, Any]], **columns: object) -> list[float]:
    """Return 1 for each response that has the form it was asked for, else 0."""
    return [float(CHECKS[own["kind"]](text.strip(), own)) for text, own in zip(completions, check, strict=True)]


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'’-]+", text.lower())


def _sentences(text: str) -> int:
    """The number of whole sentences; 0 if the last one has no end."""
    return len(re.split(r"(?<=[.!?])\s+", text)) if text.endswith((".", "!", "?")) else 0


def _is_object(text: str) -> bool:
    found = re.search(r"\{[^{}]*\}", text)
    try:
        tree = json.loads(found[0]) if found else None
    except ValueError:
        return False
    return isinstance(tree, dict) and {"name", "color"} <= tree.keys()


CHECKS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "keyword": lambda text, own: _sentences(text) == 1 and own["word"] in _words(text),
    "keywords": lambda text, own: _sentences(text) > 0 and {own["word"], own["other"]} <= set(_words(text)),
    "at_most": lambda text, own: _sentences(text) > 0 and len(_words(text)) <= own["number"],
    "sentences": lambda text, own: _sentences(text) == own["few"],
    "no_commas": lambda text, own: _sentences(text) in (2, 3) and "," not in text,
    "title": lambda text, own: re.fullmatch(r"<<[^<>]+>>", text) is not None,
    "json": lambda text, own: _is_object(text),
    "list": lambda text, own: re.findall(r"^(\d+)\. \S", text, re.M) == [str(n + 1) for n in range(own["few"])],
    "start": lambda text, own: _sentences(text) == 1 and text.startswith(f"{own['first']} "),
}


def _write(name: str, topics: Sequence[str], *, wording: int, times: int) -> None:
    rng, rows = random.Random(0), dict[str, str]()
    for topic in topics * times:
        for kind, wordings in KINDS.items():
            word, other = rng.sample(WORDS, 2)
            own = {"word": word, "other": other, "first": rng.choice(FIRSTS)}
            own |= {"number": rng.randint(6, 12), "few": rng.randint(2, 4)}
            prompt = wordings[wording].format(topic=topic, **own)
            rows[prompt] = json.dumps({"prompt": prompt, "check": {"kind": kind, **own}}) + "\n"
    lines = list(rows.values())
    rng.shuffle(lines)
    Path(__file__).with_name(name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
