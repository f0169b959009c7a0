"""Every key is described in the schema, once, and the guide's table is made from that."""

import runpy
from pathlib import Path

from gspo.recipe.schema import recipe_keys
from gspo.recipe.sections import Section

DOCS = Path(__file__).parents[2] / "docs"


def test_every_key_is_described_by_a_sentence() -> None:
    keys = dict(recipe_keys())
    assert {"rollout.group_size", "reward.per", "actor.optimizer.lr", "queries.procedural.task"} <= keys.keys()
    for key, field in keys.items():
        is_section = any(other.startswith(f"{key}.") for other in keys)
        inherits = key.startswith(("cold_start.optimizer.", "critic.optimizer."))
        assert is_section or inherits or (field.description or "").endswith("."), key


def test_the_guides_table_is_the_schemas() -> None:
    guide = (DOCS / "guide.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(DOCS / "make_reference.py"))
    assert made["with_table"](guide) == guide, "run: python docs/make_reference.py"
    for key, field in recipe_keys():
        inherits = key.startswith(("cold_start.optimizer.", "critic.optimizer."))
        has_row = inherits or isinstance(field.default, Section) or not field.description or f"| `{key}` |" in guide
        assert has_row or f"| `{key}.*` |" in guide, key
