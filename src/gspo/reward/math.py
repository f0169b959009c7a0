"""The math reward: whether a completion's answer is the column's."""

from collections.abc import Sequence
from typing import Any

from gspo.reward.builtin import completion_text, gold_answers, is_blank, within_cpu_limit


def math(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer_column: str = "answer",
    seconds_per_answer: float = 2.0,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion's last answer equals the column's, 0.0 where not or where it takes more CPU seconds.

    None where the column is empty.
    """
    from gspo.reward.final_answer import final_answer
    from gspo.reward.mathematics import read, same

    def score(gold: Any, completion: Any) -> float:
        right = read(gold)
        try:
            answer = final_answer(completion_text(completion))
            return float(answer is not None and same(right, read(answer)))
        except Exception:  # sympy raises on some texts; such an answer is wrong
            return 0.0

    golds = [None if is_blank(gold) else str(gold) for gold in gold_answers(columns, answer_column, function="math")]
    return [
        None if gold is None else within_cpu_limit(seconds_per_answer, score, gold, completion)
        for gold, completion in zip(golds, completions, strict=True)
    ]
