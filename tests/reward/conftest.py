"""Groups of rollouts made by hand, and functions as a recipe or a notebook gives them."""

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.samples import sample_of

from gspo.recipe.sections import RewardConfig
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import close_functions, load_functions
from gspo.types import Group, Messages, Query

Groups = Callable[..., list[Group]]
Functions = Callable[..., tuple[RewardFunction, ...]]


def _group(number: int, texts: Sequence[str], prompt: str | Messages, columns: dict[str, Any]) -> Group:
    query = Query(id=f"data:{number}", prompt=prompt, text="", prompt_ids=(1,), columns=columns)
    samples = (sample_of(query, [7, 8], text=text, finish_reason="stop") for text in texts)
    return Group(samples=tuple(samples))


@pytest.fixture
def groups() -> Groups:
    """A group for each list of texts, all with the same prompt; a column's value is the group's own."""

    def build(*texts: Sequence[str], prompt: str | Messages = "1+1=", **columns: Sequence[Any]) -> list[Group]:
        return [
            _group(number + 1, group, prompt, {name: values[number] for name, values in columns.items()})
            for number, group in enumerate(texts)
        ]

    return build


@pytest.fixture
def functions() -> Functions:
    """Functions with a name of their own and the same settings."""

    def build(*calls: Callable[..., Any], **settings: Any) -> tuple[RewardFunction, ...]:
        return tuple(RewardFunction(name=f"f{number}", call=call, **settings) for number, call in enumerate(calls))

    return build


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardFunction]]:
    """Functions of a source text, written to a file in the working directory and named as a recipe does."""
    monkeypatch.chdir(tmp_path)
    made: list[RewardFunction] = []

    def build(source: str, name: str = "f", **settings: Any) -> RewardFunction:
        path = tmp_path / f"mine_{len(made)}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        made.extend(load_functions([RewardConfig(function=f"{path.name}:{name}", **settings)]))
        return made[-1]

    yield build
    close_functions(made)


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process ends within seconds; an orphan may stay as a zombie where nobody waits for it."""

    def wait(pid: int) -> bool:
        for _ in range(500):
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return True
            except psutil.NoSuchProcess:
                return True
            time.sleep(0.02)
        return False

    return wait
