"""The objectives as their papers have them: what `actor.surrogate` stands for where the recipe says no more."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["token", "sequence", "sequence_token"]
LengthNorm = Literal["own", "group", "mean", "constant", "none"]
Advantage = Literal["group", "group_mean", "leave_one_out", "batch", "gae"]
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
    "minirl",
    "reinforce",
]
Range = tuple[float, float]

LEVELS: tuple[Level, ...] = ("token", "sequence", "sequence_token")
_TOKEN: tuple[Level, ...] = ("token",)
# GSPO's and GRPO's (2507.18071, §5.1), where a surrogate is used at a level that it was not published with.
_RANGES: Mapping[Level, Range] = {"sequence": (3e-4, 4e-4), "sequence_token": (3e-4, 4e-4), "token": (0.2, 0.27)}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One objective: the form of its term, and the settings it was published with."""

    title: str  # what a person calls it
    paper: str  # arXiv id
    form: str  # of the term: objective/terms.py
    level: Level = "token"
    levels: tuple[Level, ...] = LEVELS  # at which it means something
    only: str = ""  # why at no other
    ranges: Mapping[Level, Range] = field(default_factory=dict)  # clip_low, clip_high at its own level
    bounds_ratio: bool = True  # beyond 1 - clip_low … 1 + clip_high it stops the gradient
    length_norm: LengthNorm = "own"
    advantage: Advantage = "group"

    def range(self, level: Level) -> Range:
        """clip_low and clip_high at a level, where the recipe gives none."""
        return self.ranges.get(level, _RANGES[level])


PUBLISHED: Mapping[Name, Published] = {
    "clip": Published(title="GSPO", paper="2507.18071", form="clip", level="sequence"),
    "ppo": Published(
        title="PPO",
        paper="1707.06347",
        form="clip",
        levels=("token", "sequence_token"),
        only="a value model gives an advantage to every token, and the ratio of a sequence takes one a sequence",
        ranges={"token": (0.2, 0.2)},
        advantage="gae",
    ),
    "dual_clip": Published(title="dual-clip PPO", paper="1912.09729", form="dual_clip", ranges={"token": (0.2, 0.2)}),
    "dapo": Published(title="DAPO", paper="2503.14476", form="clip", ranges={"token": (0.2, 0.28)}, length_norm="mean"),
    "dr_grpo": Published(
        title="Dr. GRPO",
        paper="2503.20783",
        form="clip",
        ranges={"token": (0.2, 0.2)},
        length_norm="constant",
        advantage="group_mean",
    ),
    "luspo": Published(
        title="LUSPO",
        paper="2602.05261",
        form="clip",
        level="sequence",
        ranges={"sequence": (2e-3, 2.5e-3), "sequence_token": (2e-3, 2.5e-3)},
        length_norm="none",
    ),
    "cispo": Published(
        title="CISPO",
        paper="2506.13585",
        form="cispo",
        ranges=dict.fromkeys(LEVELS, (1.0, 4.0)),
        bounds_ratio=False,
        length_norm="group",
    ),
    "gmpo": Published(
        title="GMPO",
        paper="2507.20673",
        form="gmpo",
        levels=_TOKEN,
        only="it clips the tokens within a sequence's geometric mean; clipped as a whole that mean is GSPO: clip",
        ranges={"token": (0.4, 0.4)},
        bounds_ratio=False,
    ),
    "sapo": Published(title="SAPO", paper="2511.20347", form="sapo", bounds_ratio=False),
    "dppo": Published(
        title="DPPO",
        paper="2602.04879",
        form="dppo",
        levels=_TOKEN,
        only="it bounds how far the probability of a token moves; that of a sequence is 0 to begin with",
        ranges={"token": (0.15, 0.15)},
        bounds_ratio=False,
        length_norm="none",
        advantage="group_mean",
    ),
    "minirl": Published(
        title="MiniRL",
        paper="2512.01374",
        form="minirl",
        levels=_TOKEN,
        only="it is the first-order approximation of the sequence's objective by its tokens; at the sequence: clip",
        ranges={"token": (0.2, 0.27)},
        bounds_ratio=False,
        length_norm="none",
        advantage="group_mean",
    ),
    "reinforce": Published(
        title="REINFORCE",
        paper="2402.14740",
        form="reinforce",
        levels=_TOKEN,
        only="it has no importance ratio, so none of a sequence either: all levels are the same",
        bounds_ratio=False,
        length_norm="none",
        advantage="leave_one_out",
    ),
}

# What people also call them, and how it is written here.
ALIASES: Mapping[str, str] = {
    "gspo": "clip",
    "gspo_token": "clip with actor.importance_sampling_level: sequence_token",
    "grpo": "clip with actor.importance_sampling_level: token",
    "rloo": "reinforce",
    "opsm": "a surrogate with actor.opsm_delta",
}

Correction = Literal["none", "tis", "mis", "icepop", "geometric_mask", "decoupled"]
CorrectionLevel = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class PublishedCorrection:
    """A correction for the engine: its bounds on ρ = π_old/π_sampler, None for no bound, and whose ratio ρ can be."""

    low: float | None = None
    high: float | None = None
    levels: tuple[CorrectionLevel, ...] = ("token", "sequence")  # the first as published


CORRECTIONS: Mapping[Correction, PublishedCorrection] = {
    "none": PublishedCorrection(),
    "tis": PublishedCorrection(high=2.0),
    "mis": PublishedCorrection(low=0.5, high=2.0),
    "icepop": PublishedCorrection(low=0.5, high=5.0, levels=("token",)),
    "geometric_mask": PublishedCorrection(low=0.99, high=1.01, levels=("sequence",)),
    "decoupled": PublishedCorrection(),
}
