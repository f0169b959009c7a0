"""The math reward: whether a completion's answer is the column's, judged in a process of its own."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gspo.reward.answer import completion_text, gold_answers, is_blank
from gspo.reward.verifier_process import VERIFIERS


def math(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer_column: str = "answer",
    seconds_per_answer: float = 2.0,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion's last answer equals the column's, 0.0 where not or where it takes more CPU seconds.

    None where the column is empty. Raises VerifierError where the process that judges fails.
    """
    golds = gold_answers(columns, answer_column, function="math")
    texts = [completion_text(completion) for completion in completions]
    scores: list[float | None] = []
    for gold, pairs in groupby(
        zip(golds, texts, strict=True), key=lambda pair: "" if is_blank(pair[0]) else str(pair[0])
    ):
        answers = [text for _, text in pairs]
        if gold:
            scores += VERIFIERS["math"].scores({"gold": gold}, answers, seconds=seconds_per_answer)
        else:
            scores += [None] * len(answers)
    return scores
