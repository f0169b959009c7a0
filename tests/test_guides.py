"""What the guides name exists: recipe keys, values, diagnoses; and a recipe shown there can be loaded."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from gspo.metrics import words
from gspo.recipe.load import make_recipe
from gspo.recipe.schema import recipe_keys

GUIDES = sorted((Path(__file__).parents[1] / "docs" / "guides").glob("*.md"))
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in GUIDES}
KEYS = {name for name, _ in recipe_keys()}
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}
FILES = re.compile(r"\.(jsonl?|ya?ml|py|md|html)$")
RECIPES = [
    pytest.param(text, id=f"{stem}-{number}")
    for stem, guide in TEXTS.items()
    for number, text in enumerate(re.findall(r"^```yaml[^\n]*\n(.*?)^```", guide, re.MULTILINE | re.DOTALL), 1)
]
BASE = {"name": "guide", "steps": 1, "model": {"path": "my-model"}}


def without_index(key: str) -> str:
    return re.sub(r"^(reward|phases)\.\d+", r"\1", key)


def is_known(key: str) -> bool:
    """Whether it is a key, a section, or lies within a mapping that is free, such as the options of a reward."""
    parents = [key.rsplit(".", cut)[0] for cut in range(key.count(".") + 1)]
    return key in KEYS or any(parent in ("reward.options", "model.architecture") for parent in parents)


def keys_in(text: str) -> set[str]:
    """The dotted names in code that begin like a recipe's section, and end before a value."""
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = re.findall(r"(?<![\w./`-])([a-z_]+(?:\.[a-z_0-9]+)+)(?=[=:,\s]|$)", code)
    return {without_index(key) for key in named if key.partition(".")[0] in SECTIONS and not FILES.search(key)}


def gspo_columns(text: str) -> str:
    """The second column of the tables of keys: the first has the other library's names."""
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|-")]
    cells = [re.split(r"(?<!\\)\|", row) for row in rows]
    return "\n".join(cell[2] for cell in cells if len(cell) > 2)


@pytest.mark.parametrize("stem", [stem for stem in TEXTS if not stem.startswith("from_")])
def test_every_recipe_key_that_a_guide_names_exists(stem: str) -> None:
    assert {key for key in keys_in(TEXTS[stem]) if not is_known(key)} == set()


@pytest.mark.parametrize("stem", ["from_trl", "from_verl", "from_areal"])
def test_a_table_of_keys_has_25_rows_and_names_keys_that_exist(stem: str) -> None:
    table = TEXTS[stem].partition("## Keys")[2].partition("\n## ")[0]
    column = gspo_columns(table)
    assert len(column.splitlines()) > 25
    assert {key for key in keys_in(column) if not is_known(key)} == set()


@pytest.mark.parametrize("text", RECIPES)
def test_a_recipe_that_a_guide_shows_is_accepted(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite, too, which says the name of its file in its first line; a recipe may name that."""
    monkeypatch.chdir(tmp_path)
    for own in (block.values[0] for block in RECIPES):
        if match := re.match(r"# (\w+\.yaml)\n", str(own)):
            Path(match[1]).write_text(str(own), encoding="utf-8")
    suite = re.match(r"# (\w+\.yaml)\n", text)
    make_recipe(BASE | ({"evaluation": {"suites": [suite[1]]}} if suite else yaml.safe_load(text)))


def test_every_diagnosis_has_a_section_and_a_row() -> None:
    named = set(re.findall(r'f?"""?([a-z_]+): ', inspect.getsource(words.diagnoses)))
    for table in (words._of_rewards_and_clipping, words._of_samples_and_updates, words._of_engines, words._of_moves):
        named |= set(re.findall(r'f?"{1,3}([a-z_]+): ', inspect.getsource(table)))
    guide = TEXTS["diagnoses"]
    assert len(named) >= 13
    assert set(re.findall(r"^## ([a-z_]+)$", guide, re.MULTILINE)) == named
    assert set(re.findall(r"^\| \[`([a-z_]+)`\]", guide, re.MULTILINE)) == named
