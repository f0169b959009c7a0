"""What each number of metrics.jsonl means, read from definitions.yaml."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One metric, in Markdown.

    Example: Definition(text="Mean length of the sampled responses.", healthy="")
    """

    text: str
    healthy: str = ""  # how it looks in a run that goes well; empty if no value is better than another


@dataclass(frozen=True, kw_only=True)
class Family:
    """Metrics that are read together: a heading, a paragraph about all of them, and their definitions by name."""

    title: str
    about: str
    metrics: Mapping[str, Definition]


@cache
def families() -> Sequence[Family]:
    """Return all families, in the order in which a reader wants them."""
    text = files("gspo.metrics").joinpath("definitions.yaml").read_text(encoding="utf-8")
    return [
        Family(**{**family, "metrics": {name: Definition(**row) for name, row in family["metrics"].items()}})
        for family in yaml.safe_load(text)
    ]


def definition_of(metric: str) -> Definition | None:
    """The definition of a metric of a run; None for a name of another version."""
    name = general_name(metric)
    return next((family.metrics[name] for family in families() if name in family.metrics), None)


def general_name(metric: str) -> str:
    """The name a metric is defined under, with `<set>` for an evaluated set and `<function>` for a reward function."""
    if match := re.match(r"(evaluation/[^/]+/)?logged/", metric):
        return f"{'evaluation/<set>/' if match[1] else ''}logged/<function>/<name>"
    metric = re.sub(r"^(evaluation/[^/]+/pass_at)_(?!1$)\d+$", r"\1_<k>", metric)
    metric = re.sub(r"^queries/[^/]+/", "queries/<source>/", metric)
    metric = re.sub(r"^hook/.+$", "hook/<name>", metric)
    metric = re.sub(r"^evaluation/.+/[^/]+/mean$", "evaluation/<set>/<function>/mean", metric)
    metric = re.sub(r"^evaluation/.+?(/<function>/mean|/[^/]+)$", r"evaluation/<set>\1", metric)
    return re.sub(r"^reward/.+/(mean|seconds)$", r"reward/<function>/\1", metric)
