"""What the data and the reward functions make of a recipe's evaluation, where it is not what one would expect."""

import math
from collections.abc import Sequence

from gspo.evaluation.held_out import verdict
from gspo.recipe.schema import Recipe
from gspo.reward.functions import JUNK
from gspo.types import Score


def evaluation_notes(recipe: Recipe, num_held_out: int, probed: Sequence[tuple[str, Score]]) -> list[str]:
    """Sentences about an evaluation on few queries, and about a threshold that cannot tell right from wrong.

    `probed` are the scores of a row's own answer, where it has one, and of junk, by text. An answer that gets no more
    than junk is not known in its bare form, which says nothing of the threshold. Without an answer, junk may be as
    right as anything: only a number above the threshold is worth a word.
    """
    wanted, threshold = recipe.evaluation.num_queries, recipe.evaluation.pass_threshold
    is_a_tenth = recipe.evaluation.path is None and recipe.queries.procedural is None
    (gold_by, gold), (junk_by, junk) = (_judged(score) for _, score in probed)
    has_answer, is_unknown = probed[0][0] != JUNK, gold <= junk
    fix = "set evaluation.pass_threshold to what a right answer gets"
    table = {
        f"""{num_held_out} {"row is" if num_held_out == 1 else "rows are"} held out for evaluation, not the {wanted} of
        evaluation.num_queries: at most a tenth of the data is. For more, give evaluation.path or more data; else set
        evaluation.num_queries={num_held_out}
        """: is_a_tenth and num_held_out < wanted,
        f"""{gold_by} gives the row's own answer {gold:g}{f" and junk {junk:g}" if is_unknown else ""}, and
        evaluation.pass_threshold is {threshold:g}: if no response gets more, pass@1 stays 0; {fix}
        """: has_answer and (0 < junk < threshold if is_unknown else gold < threshold),
        f"""{junk_by} gives junk {junk:g}, and evaluation.pass_threshold is {threshold:g}: such a response passes; {fix}
        """: junk > threshold or (has_answer and junk == threshold),
    }
    return [" ".join(sentence.split()) for sentence, holds in table.items() if holds and num_held_out]


def _judged(score: Score) -> tuple[str, float]:
    """The function that judges and its number; NaN, which is above and below nothing, where there is none."""
    judging = verdict(score)
    return (judging.function, judging.value) if judging and isinstance(judging.value, float) else ("", math.nan)
