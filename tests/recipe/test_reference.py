"""Every key is described in the schema, once: docs/reference/recipe.md is made from that."""

from gspo.recipe.schema import recipe_keys


def test_every_key_is_described_by_a_sentence() -> None:
    keys = dict(recipe_keys())
    assert {"rollout.group_size", "reward.per", "actor.optimizer.lr", "queries.procedural.task"} <= keys.keys()
    for key, field in keys.items():
        is_section = any(other.startswith(f"{key}.") for other in keys)
        inherits = key.startswith(("cold_start.optimizer.", "critic.optimizer."))
        assert is_section or inherits or (field.description or "").endswith("."), key
