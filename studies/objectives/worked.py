"""Sums that are worked term by term: demonstrations in that one style, and a reward for every line that is right."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.queries.worked import chain_sum

_LINE = re.compile(r"(-?\d+)([+-])(\d+)=(-?\d+)")


def always(row: Mapping[str, Any], rng: random.Random) -> str:
    """`7+4=11, 11+3=14 <answer>14</answer>` for `7 + 4 + 3`; UserError for a row of another task than chain_sum.

    In one style responses have one length, more or less: that of the question.
    """
    return chain_sum(row, rng, worked_fraction=1.0)


def lines_right(
    prompts: Sequence[Any], completions: Sequence[Any], *, entry: Sequence[Mapping[str, Any]], **columns: Any
) -> list[float]:
    """The fraction of lines that go on from the total before, add the question's next term, and get the sum right.

    Lines beyond the question's count as wrong. Graded, for a model this small does not get all of 30 lines right.
    """
    return [
        _fraction_right(item["metadata"]["expression"], completion)
        for item, completion in zip(entry, completions, strict=True)
    ]


def _fraction_right(expression: str, completion: str) -> float:
    first, *rest = expression.split()
    wanted = list(zip(rest[::2], rest[1::2], strict=True))
    lines, total, right = _LINE.findall(completion.replace(" ", "")), first, 0
    for (left, operator, term, result), next_term in zip(lines, wanted, strict=False):
        value = int(left) + int(term) if operator == "+" else int(left) - int(term)
        right += left == total and (operator, term) == next_term and value == int(result)
        total = result
    return right / max(len(wanted), len(lines), 1)
