"""What is compared, as data: the arms of both parts, the models they begin from, the seeds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from studies.harness.jobs import Overrides

SEEDS = (1, 2, 3)
COLD: Overrides = {"queries.procedural.size": 20_000}  # of every cold start

# The default recipe's. The paper's 3e-4/4e-4 is for thousands of tokens, and responses have tens here.
SEQUENCE_CLIP: Overrides = {"actor.clip_low": 3e-3, "actor.clip_high": 4e-3}
CLIP_FRACTION = 0.15
# Below clip_low: a sequence of Â < 0 that has fallen further than that has no gradient in GSPO anyway.
OPSM_DELTA = 1e-3
CRITIC_LR: Mapping[str, float] = {"own": 3e-4, "shared": 3e-3}  # the better of those below, on seed 11
CRITIC_LRS: Mapping[str, tuple[float, float]] = {"own": (1e-4, 3e-4), "shared": (3e-4, 3e-3)}
CRITIC_SEED = 11


@dataclass(frozen=True, kw_only=True)
class Start:
    """A cold-started model: base.yaml, with these keys changed, before any reinforcement learning."""

    name: str
    cold: Overrides = field(default_factory=dict)  # in the cold start only
    task: Overrides = field(default_factory=dict)  # in the cold start and in the runs that begin from it


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison: base.yaml with these keys."""

    name: str
    label: str
    what: str  # that sets it apart, in the words of the recipe
    overrides: Overrides


def _published(name: str, label: str, *, what: str = "", **overrides: object) -> Arm:
    keys = {"actor.surrogate": name, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return Arm(name=name, label=label, what=what or f"`surrogate: {name}`", overrides=keys)


def _gspo(name: str, label: str, what: str, overrides: Overrides) -> Arm:
    return Arm(name=name, label=label, what=what, overrides={**SEQUENCE_CLIP, **overrides})


def _critic(trunk: str, lr: float, name: str) -> Arm:
    keys = {"actor.surrogate": "ppo", "critic.trunk": trunk, "critic.optimizer.lr": lr}
    what = f"`surrogate: ppo`, `critic.trunk: {trunk}`, `critic.optimizer.lr: {lr:g}`"
    return Arm(name=name, label=f"PPO, {trunk} trunk", what=what, overrides=keys)


GSPO = _gspo("gspo", "GSPO", "the default: `surrogate: clip`", {})
OBJECTIVES = (
    GSPO,
    _gspo("gspo_fraction", "GSPO, range sets itself", "`clip_fraction: 0.15`", {"actor.clip_fraction": CLIP_FRACTION}),
    _gspo(
        "gspo_wide",
        "GSPO, 10 × the range",
        "`clip_low: 3e-2`, `clip_high: 4e-2`",
        {"actor.clip_low": 3e-2, "actor.clip_high": 4e-2},
    ),
    _gspo("gspo_opsm", "GSPO + OPSM", f"`opsm_delta: {OPSM_DELTA:g}`", {"actor.opsm_delta": OPSM_DELTA}),
    _gspo(
        "gspo_token",
        "GSPO-token",
        "`importance_sampling_level: sequence_token`",
        {"actor.importance_sampling_level": "sequence_token"},
    ),
    Arm(
        name="grpo",
        label="GRPO",
        what="`importance_sampling_level: token`",
        overrides={"actor.importance_sampling_level": "token"},
    ),
    _published("dual_clip", "dual-clip PPO"),
    _published("dapo", "DAPO"),
    Arm(
        name="dapo_dynamic",
        label="DAPO, dynamic sampling",
        what="`surrogate: dapo`, `rollout.dynamic_sampling: true`",
        overrides={"actor.surrogate": "dapo", "rollout.dynamic_sampling": True},
    ),
    _published("dr_grpo", "Dr. GRPO"),
    _published("cispo", "CISPO"),
    _published("gmpo", "GMPO"),
    _published("sapo", "SAPO"),
    _published("luspo", "LUSPO"),
    _published("dppo", "DPPO"),
    _published("ipo", "IPO (prime-rl)"),
    _published(
        "minirl",
        "MiniRL",
        what="`surrogate: minirl`, `old_logprobs: recompute`",
        actor__old_logprobs="recompute",  # it tells π_old from the engine
    ),
    _published("reinforce", "REINFORCE (RLOO)"),
    _critic("own", CRITIC_LR["own"], "ppo_own"),
    _critic("shared", CRITIC_LR["shared"], "ppo_shared"),
)
# Sums over tokens have gradients of norm 4 to 7, all of which max_grad_norm makes 1. Here they are as they come.
UNBOUND = tuple(
    Arm(
        name=f"{arm.name}_unbound",
        label=arm.label,
        what=f"{arm.what}, `actor.optimizer.max_grad_norm: 1000`",
        overrides={**arm.overrides, "actor.optimizer.max_grad_norm": 1000.0},
    )
    for arm in OBJECTIVES
    if arm.name in ("luspo", "dppo", "minirl", "reinforce")
)
CRITIC_TRIALS = tuple(_critic(trunk, lr, f"{trunk}_{lr:g}") for trunk, lrs in CRITIC_LRS.items() for lr in lrs)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Responses of one length."""

    name: str  # the folder of the results
    tokens: int  # about
    start: Start
    overrides: Overrides = field(default_factory=dict)  # of its runs


def _task(min_terms: int, max_terms: int, max_new_tokens: int) -> Overrides:
    return {
        "queries.procedural.min_terms": min_terms,
        "queries.procedural.max_terms": max_terms,
        "rollout.max_new_tokens": max_new_tokens,
    }


_WORKED: Overrides = {"cold_start.demonstrations": "studies.objectives.worked:always"}  # one style, so one length
DEFAULT = Start(name="default")
LENGTHS = (
    Length(
        name="length_16",
        tokens=16,
        start=Start(name="length_16", cold={**_WORKED, "cold_start.steps": 300}, task=_task(2, 4, 32)),
    ),
    Length(
        name="length_64",
        tokens=64,
        start=Start(name="length_64", cold={**_WORKED, "cold_start.steps": 400}, task=_task(8, 10, 96)),
    ),
    Length(
        name="length_256",
        tokens=256,
        start=Start(
            name="length_256",
            cold={
                **_WORKED,
                "cold_start.rows_per_step": 16,
                "model.architecture.max_position_embeddings": 512,
            },
            task=_task(30, 34, 340),
        ),
    ),
)
# The same model and the same questions, with the responses cut off: nothing but the length differs.
CUTS = (
    *(
        Length(
            name=f"cut_{tokens}",
            tokens=tokens,
            start=LENGTHS[-1].start,
            overrides={"rollout.max_new_tokens": tokens},
        )
        for tokens in (16, 64)
    ),
    LENGTHS[-1],
)
RANGES = (
    _gspo("narrow", "3e-4/4e-4", "fixed", {"actor.clip_low": 3e-4, "actor.clip_high": 4e-4}),
    _gspo("middle", "3e-3/4e-3", "fixed", {}),
    _gspo("wide", "3e-2/4e-2", "fixed", {"actor.clip_low": 3e-2, "actor.clip_high": 4e-2}),
    _gspo("itself", "sets itself", "`clip_fraction: 0.15`", {"actor.clip_fraction": CLIP_FRACTION}),
)
OBJECTIVE_RUN: Overrides = {"steps": 16}
TRIAL_RUN: Overrides = {"steps": 12}
LENGTH_RUN: Overrides = {  # of the second part
    "steps": 12,
    "rollout.queries_per_step": 8,
    "evaluation.num_queries": 0,
    "reward": [{"function": "studies.objectives.worked:lines_right", "concurrent_calls": 1}],
}
