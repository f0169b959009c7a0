"""What is compared, as data: the models runs begin from, the arms, the clip ranges, the seeds, the conditions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from studies.harness.jobs import Overrides

ClipRange = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Start:
    """A cold-started model: base.yaml, with these keys changed, before any reinforcement learning."""

    name: str
    what: str
    cold: Overrides = field(default_factory=dict)  # in the cold start only
    task: Overrides = field(default_factory=dict)  # in the cold start and in the runs that begin from it


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of the comparison."""

    name: str
    label: str
    model: Literal["moe", "dense"]
    level: Literal["sequence", "token"]
    replays: bool = False

    @property
    def clips(self) -> Mapping[str, ClipRange]:
        """The ranges that its sweep tries, by name."""
        return SEQUENCE_CLIPS if self.level == "sequence" else TOKEN_CLIPS


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One thing changed from the main comparison, in every mixture-of-experts arm."""

    name: str
    what: str
    overrides: Overrides = field(default_factory=dict)
    start: str = "moe"
    replay: Literal["policy", "engine"] = "policy"  # whose experts the arms with replay take
    seeds: Sequence[int] = (1, 2, 3)


_DENSE = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,  # as wide as the 2 experts of 64 that are active in the mixture
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
_DEEP = {
    "model.architecture.num_hidden_layers": 6,
    "model.architecture.num_experts": 32,
    "model.architecture.num_experts_per_tok": 4,
    "model.architecture.moe_intermediate_size": 32,
    "cold_start.steps": 550,
}
_LONG_TASK = {
    "queries.procedural.min_terms": 9,
    "queries.procedural.max_terms": 12,
    "rollout.max_new_tokens": 160,
}

STARTS = {
    start.name: start
    for start in (
        Start(name="moe", what="2 layers, 2 of 24 experts"),
        Start(name="dense", what="2 layers, dense", cold={"model.architecture": _DENSE}),
        Start(name="deep", what="6 layers, 4 of 32 experts", cold=_DEEP),
        Start(name="long", what="2 layers, 2 of 24 experts, sums of 9–12 terms", task=_LONG_TASK),
    )
}
COLD: Overrides = {"queries.procedural.size": 20_000}  # of every cold start

ARMS = (
    Arm(name="gspo_moe", label="GSPO", model="moe", level="sequence"),
    Arm(name="gspo_r2_moe", label="GSPO + replay", model="moe", level="sequence", replays=True),
    Arm(name="grpo_moe", label="GRPO", model="moe", level="token"),
    Arm(name="grpo_r2_moe", label="GRPO + replay", model="moe", level="token", replays=True),
    Arm(name="gspo_dense", label="GSPO, dense", model="dense", level="sequence"),
    Arm(name="grpo_dense", label="GRPO, dense", model="dense", level="token"),
)
MOE_ARMS = tuple(arm for arm in ARMS if arm.model == "moe")

# The sequence ratio moves by thousandths here: responses have tens of tokens, the paper's thousands (3e-4, 4e-4).
SEQUENCE_CLIPS = {"narrow": (1e-3, 1.33e-3), "middle": (3e-3, 4e-3), "wide": (1e-2, 1.33e-2)}
TOKEN_CLIPS = {"narrow": (0.1, 0.135), "middle": (0.2, 0.27), "wide": (0.4, 0.54)}

TUNE_SEEDS = (11, 12)

MAIN = Condition(name="main", what="4 mini-batches, 2 layers of 24 experts, learning rate 1e-4", seeds=(1, 2, 3, 4, 5))
FACTORS = (
    Condition(
        name="learning_rate_4",
        what="learning rate × 4",
        overrides={"actor.optimizer.lr": 4e-4},
        seeds=(1, 2, 3, 4, 5),  # 4 and 5 were added once the first three had set the arms apart
    ),
    Condition(name="learning_rate_10", what="learning rate × 10", overrides={"actor.optimizer.lr": 1e-3}),
    Condition(name="mini_batches_16", what="16 mini-batches", overrides={"actor.mini_batches": 16}),
    Condition(name="mini_batches_1", what="1 mini-batch: on-policy", overrides={"actor.mini_batches": 1}),
    Condition(
        name="noise",
        what="bfloat16, sampler's π_old and experts",
        overrides={"model.dtype": "bfloat16", "actor.old_logprobs": "engine"},
        replay="engine",
    ),
    Condition(name="deep", what="6 layers, 4 of 32 experts", start="deep"),
    Condition(name="long", what="sums of 9–12 terms", start="long"),
)
