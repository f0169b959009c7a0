"""The objectives as their papers have them: what `actor.surrogate` stands for where the recipe says no more."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["token", "sequence", "sequence_token"]
LengthNorm = Literal["own", "group", "mean", "turns", "constant", "none"]
Advantage = Literal["group", "group_mean", "leave_one_out", "batch", "max_rl", "optimal_token_baseline", "gae"]
Name = Literal[
    "clip",
    "ppo",
    "dual_clip",
    "dapo",
    "dr_grpo",
    "luspo",
    "cispo",
    "gmpo",
    "sapo",
    "dppo",
    "ipo",
    "minirl",
    "reinforce",
]
Correction = Literal["none", "tis", "mis", "icepop", "kpop", "geometric_mask", "decoupled", "ignore"]
CorrectionLevel = Literal["token", "sequence"]
Range = tuple[float, float]

LEVELS: tuple[Level, ...] = ("token", "sequence", "sequence_token")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One objective: the form of its term, and the settings it was published with.

    Example: `PUBLISHED["dapo"].range("token")` is (0.2, 0.28).
    """

    title: str  # what a person calls it
    form: str  # of the term, by its name in objective/terms.py
    level: Level = "token"
    levels: tuple[Level, ...] = LEVELS  # at which it has a meaning; ONLY says why it has none at the others
    token_range: Range = (0.2, 0.27)  # clip_low, clip_high of token ratios; this default is GRPO's (2507.18071, §5.1)
    sequence_range: Range = (3e-4, 4e-4)  # clip_low, clip_high of sequence ratios; this default is GSPO's
    length_norm: LengthNorm = "own"
    advantage: Advantage = "group"

    def range(self, level: Level) -> Range:
        """clip_low and clip_high at a level, where the recipe gives none."""
        return self.token_range if level == "token" else self.sequence_range

    @property
    def bounds_ratio(self) -> bool:
        """Tell whether the gradient stops beyond 1 - clip_low … 1 + clip_high."""
        return self.form in ("clip", "dual_clip")

    @property
    def weighs_by_engine(self) -> bool:
        """Tell whether the term's ratio is to the engine that sampled, whatever π_old is."""
        return self.form in ("dppo", "ipo", "minirl")


# After each name stands the arXiv id of its paper.
PUBLISHED: Mapping[Name, Published] = {
    "clip": Published(title="GSPO", form="clip", level="sequence"),  # 2507.18071
    "ppo": Published(  # 1707.06347
        title="PPO", form="clip", levels=("token", "sequence_token"), token_range=(0.2, 0.2), advantage="gae"
    ),
    "dual_clip": Published(title="dual-clip PPO", form="dual_clip", token_range=(0.2, 0.2)),  # 1912.09729
    "dapo": Published(title="DAPO", form="clip", token_range=(0.2, 0.28), length_norm="mean"),  # 2503.14476
    "dr_grpo": Published(  # 2503.20783
        title="Dr. GRPO", form="clip", token_range=(0.2, 0.2), length_norm="constant", advantage="group_mean"
    ),
    "luspo": Published(  # 2602.05261
        title="LUSPO", form="clip", level="sequence", sequence_range=(2e-3, 2.5e-3), length_norm="none"
    ),
    "cispo": Published(  # 2506.13585
        title="CISPO", form="cispo", token_range=(1.0, 4.0), sequence_range=(1.0, 4.0), length_norm="group"
    ),
    "gmpo": Published(title="GMPO", form="gmpo", levels=("token",), token_range=(0.4, 0.4)),  # 2507.20673
    "sapo": Published(title="SAPO", form="sapo"),  # 2511.20347
    "dppo": Published(  # 2602.04879
        title="DPPO",
        form="dppo",
        levels=("token",),
        token_range=(0.15, 0.15),
        length_norm="none",
        advantage="group_mean",
    ),
    "ipo": Published(  # no paper; prime-rl, pull request 3586: 0.3 and no KL
        title="IPO", form="ipo", levels=("token",), token_range=(0.3, 0.3), length_norm="mean", advantage="group_mean"
    ),
    "minirl": Published(  # 2512.01374
        title="MiniRL", form="minirl", levels=("token",), length_norm="none", advantage="group_mean"
    ),
    "reinforce": Published(  # 2402.14740
        title="REINFORCE", form="reinforce", levels=("token",), length_norm="none", advantage="leave_one_out"
    ),
}

_OF_A_TOKEN = "it bounds how far the probability of a token moves; that of a sequence is 0 to begin with"
# Why an objective has a meaning at its own levels only.
ONLY: Mapping[str, str] = {
    "ppo": "a value model gives an advantage to every token, and the ratio of a sequence takes one a sequence",
    "gmpo": "it clips the tokens within a sequence's geometric mean; clipped as a whole that mean is GSPO: clip",
    "dppo": _OF_A_TOKEN,
    "ipo": _OF_A_TOKEN,
    "minirl": "it is the first-order approximation of the sequence's objective by its tokens; at the sequence: clip",
    "reinforce": "it has no importance ratio, so none of a sequence either: all levels are the same",
}


@dataclass(frozen=True, kw_only=True)
class PublishedCorrection:
    """A correction for the engine: its bounds on ρ = π_old/π_sampler, None for no bound, and whose ratio ρ can be.

    That of kpop is a bound in nats, on the divergence of two coins.

    Example: `CORRECTIONS["icepop"]` keeps tokens with 0.5 ≤ ρ ≤ 5.
    """

    low: float | None = None
    high: float | None = None
    levels: tuple[CorrectionLevel, ...] = ("token", "sequence")  # the first as published


CORRECTIONS: Mapping[Correction, PublishedCorrection] = {
    "none": PublishedCorrection(),
    "tis": PublishedCorrection(high=2.0),
    "mis": PublishedCorrection(low=0.5, high=2.0),
    "icepop": PublishedCorrection(low=0.5, high=5.0, levels=("token",)),
    "kpop": PublishedCorrection(high=2.0, levels=("token",)),  # AReaL's kpop_phi
    "geometric_mask": PublishedCorrection(low=0.99, high=1.01, levels=("sequence",)),
    "decoupled": PublishedCorrection(),
    "ignore": PublishedCorrection(),  # of stale responses, on purpose
}


def when_stale(actor: Mapping[str, Any], max_staleness: Any) -> Mapping[str, Any]:
    """The keys of `actor`, with `correction: decoupled` where responses may be stale and nothing says how that counts.

    π_old of the trainer has not sampled such a response: a ratio to it knows nothing of the steps in between.
    """
    weighs = any(own.weighs_by_engine for name, own in PUBLISHED.items() if name == actor.get("surrogate"))
    is_open = "correction" not in actor and actor.get("old_logprobs") != "engine" and not weighs
    return {**actor, "correction": "decoupled"} if is_open and max_staleness not in (None, 0) else actor


def as_it_was(tree: Any) -> Any:
    """A run's recipe in the words of today: before `ignore` there was `correction: none` for stale responses, too."""
    actor, rollout = (tree.get(name) if isinstance(tree, dict) else None for name in ("actor", "rollout"))
    if not isinstance(actor, dict) or not isinstance(rollout, dict) or actor.get("correction") != "none":
        return tree
    others = {name: value for name, value in actor.items() if name != "correction"}
    is_stale = "correction" in when_stale(others, rollout.get("max_staleness"))
    return {**tree, "actor": {**actor, "correction": "ignore"}} if is_stale else tree


def as_published(actor: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `actor`; those left out, or null, are as in the papers of the surrogate and the correction."""
    # What is neither is refused by the key itself.
    published = next((PUBLISHED[name] for name in PUBLISHED if name == actor.get("surrogate")), PUBLISHED["clip"])
    corrected = next(
        (CORRECTIONS[name] for name in CORRECTIONS if name == actor.get("correction")), CORRECTIONS["none"]
    )
    level = actor.get("importance_sampling_level")
    low, high = published.range(level if level in published.levels else published.level)
    in_papers = {
        "importance_sampling_level": published.level,
        "advantage": published.advantage,
        "length_norm": published.length_norm,
        "clip_low": low,
        "clip_high": high,
        "correction_level": corrected.levels[0],
        "correction_low": corrected.low,
        "correction_high": corrected.high,
    }
    return in_papers | {name: value for name, value in actor.items() if value is not None or name not in in_papers}
