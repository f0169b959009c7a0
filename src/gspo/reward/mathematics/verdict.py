"""Whether a completion's answer is the right one."""

from collections.abc import Callable, Sequence

from gspo.reward.mathematics.claim import claimed_answer
from gspo.reward.mathematics.equality import equal_values
from gspo.reward.mathematics.parser import Value
from gspo.reward.mathematics.reading import Collection, Equation, Quantity, Reading, read

ORDERED = ("()", "(]", "[)", "[]", "matrix", "row")


def judge(gold: str) -> Callable[[str], float]:
    """From completions to 1.0 or 0.0, for one right answer."""
    right = read(gold)

    def verdict(completion: str) -> float:
        answer = claimed_answer(completion)
        return float(answer is not None and same(right, read(answer)))

    return verdict


def warm_up() -> None:
    """Make what the first answer would have to wait for."""
    judge(r"\frac{x^2 - 1}{2}, \sqrt{3}")(r"\boxed{\sqrt{3}, \frac{(x - 1)(x + 1)}{2}} \sin")


def same(gold: Reading, answer: Reading) -> bool:
    """Whether the answer says what the gold one says."""
    if gold.text and gold.text == answer.text:
        return True
    if gold.label and answer.label and gold.label != answer.label:
        return False
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return _same_quantity(gold, answer)
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        ours, theirs = gold.difference, answer.difference
        return equal_values(ours, theirs) or equal_values(ours, Value(number=-theirs.number))
    if isinstance(gold, Quantity) and isinstance(answer, Equation) and answer.side is not None:
        return _same_quantity(gold, answer.side)
    gold, answer = _without_set_of_one(gold), _without_set_of_one(answer)
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        return _same_collection(gold, answer)
    return isinstance(gold, Quantity) and isinstance(answer, Quantity) and _same_quantity(gold, answer)


def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """A unit that only one of them names is no difference; an operator that the answer leaves to the reader is one."""
    if gold.unit is not None and answer.unit is not None and gold.unit != answer.unit:
        return False
    return answer.value.operators <= gold.value.operators and equal_values(gold.value, answer.value)


def _same_collection(gold: Collection, answer: Collection) -> bool:
    kinds = {gold.kind, answer.kind}
    if len(gold.items) != len(answer.items) or (len(kinds) == 2 and kinds not in ({",", "{}"}, {",", "()"})):
        return False
    if kinds & set(ORDERED):
        return all(same(*pair) for pair in zip(gold.items, answer.items, strict=True))
    return _same_in_any_order(gold.items, answer.items)


def _same_in_any_order(golds: Sequence[Reading], answers: Sequence[Reading]) -> bool:
    left = list(answers)
    for gold in golds:
        place = next((number for number, answer in enumerate(left) if same(gold, answer)), None)
        if place is None:
            return False
        del left[place]
    return True


def _without_set_of_one(reading: Reading) -> Reading:
    is_one = isinstance(reading, Collection) and reading.kind == "{}" and len(reading.items) == 1
    return reading.items[0] if is_one and isinstance(reading, Collection) else reading
