"""What of a recipe may change between a run and its resumption: what is listed here, and nothing else."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.recipe.load import dump_recipe, load_recipe
from gspo.run.resume import recipe_changes

TINY = Path(__file__).parents[2] / "tiny.yaml"
SAFE = {
    "name",
    "output_dir",
    "steps",
    "checkpoint.every",
    "checkpoint.seconds",
    "checkpoint.keep",
    "checkpoint.best",
    "checkpoint.best_is",
    "early_stop.metric",
    "early_stop.best_is",
    "early_stop.patience",
    "early_stop.min_improvement",
    "early_stop.goal",
    "hooks",
    "hook_errors",
    "trainer.timeout_seconds",
    *("cluster.engines", "cluster.gpus_per_engine", "cluster.cpus_per_engine"),
    *("teacher.url", "teacher.key_variable"),
    "report.trackers",
    "report.project",
    "report.rollouts",
    "report.tokens",
    "evaluation.every",
    "reward.0.time_limit_seconds",
    "reward.0.concurrent_calls",
    "reward.1.time_limit_seconds",
    "reward.1.concurrent_calls",
}
ROUNDING = {"rollout.max_rows", "actor.micro_batch_tokens", "actor.gradient_checkpointing", "actor.gradient_noise"}
ROUNDING |= {f"rollout.{name}" for name in ("max_staleness", "too_old", "in_turn", "interrupt", "old_cache")}
ROUNDING |= {"model.attn_implementation", "rollout.engine", "trainer.sharding", "rollout.history"}
ROUNDING |= {"rollout.vllm.adapters"}
for server in ("rollout.vllm", "rollout.sglang"):
    SAFE |= {f"{server}.{name}" for name in ("python", "urls", "devices", "weights", "weights_dir")}
    SAFE |= {f"{server}.start_seconds", f"{server}.request_seconds"}
    ROUNDING |= {f"{server}.dtype", f"{server}.options"}


def tree(*overrides: str) -> dict[str, Any]:
    two = "reward=[{function: reasoning_gym}, {function: math, weight: 0.5}]"
    loaded: dict[str, Any] = yaml.safe_load(dump_recipe(load_recipe(TINY, [two, *overrides])))
    return loaded


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict | list) and node:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, value in pairs for leaf in leaves(value, (*path, key))]
    return [path]


def test_every_key_of_a_recipe_is_refused_unless_it_is_known_to_change_nothing_that_is_learned() -> None:
    by_effect: dict[str, set[str]] = {"none": set(), "rounding": set(), "another run": set()}
    then = tree()
    for path in leaves(then):
        changed = node = copy.deepcopy(then)
        for key in path[:-1]:
            node = node[key]
        old, node[path[-1]] = node[path[-1]], "changed"
        (found,), name = recipe_changes(then, changed), ".".join(map(str, path))
        assert str(found) == f"{name} was {old}, is changed"
        by_effect[found.effect].add(name)
    assert (by_effect["none"], by_effect["rounding"]) == (SAFE, ROUNDING)


def test_nothing_has_changed_in_the_same_recipe() -> None:
    assert recipe_changes(tree(), tree()) == []


@pytest.mark.parametrize(
    ("override", "unsafe"),
    [
        ("reward.1.options={pattern: a}", ["reward.1.options was {}", "reward.1.options.pattern was None, is a"]),
        ("reward=[]", ["reward.0.function was reasoning_gym, is None", "reward.1.weight was 0.5, is None"]),
        ("reward.0.options={every: 1}", ["reward.0.options.every was None, is 1"]),
        ("model.architecture.num_experts=4", ["model.architecture.num_experts was None, is 4"]),
        ("queries.procedural.min_terms=3", ["queries.procedural.min_terms was 2, is 3"]),
        ("actor.optimizer.betas=[0.9, 0.95]", ["actor.optimizer.betas.1 was 0.99, is 0.95"]),
        ("rollout.stop_tokens=['7']", ["rollout.stop_tokens.0 was None, is 7"]),
        ("seed=1", ["seed was 0, is 1"]),
    ],
)
def test_what_comes_goes_or_moves_is_named_with_what_it_was_and_is(override: str, unsafe: list[str]) -> None:
    found = recipe_changes(tree(), tree(override))
    refused = [str(change) for change in found if change.effect == "another run"]
    assert [line for line in unsafe if not any(one.startswith(line) for one in refused)] == []
    assert all(change.effect == "another run" or change.key.endswith(("calls", "seconds")) for change in found)


def test_a_key_that_a_later_version_has_added_with_none_is_no_change() -> None:
    then = tree()
    del then["reward"][0]["concurrent_calls"], then["queries"]["system"]
    assert recipe_changes(then, tree()) == []
