"""The settings of an objective: its name, whose ratio it bounds, and the numbers that bound it."""

from dataclasses import dataclass
from typing import Any, get_args

from gspo.objective.ratio import check_name
from gspo.recipe.published import LEVELS, ONLY, PUBLISHED, LengthNorm, Level, Name

_LEAST = {"clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.0, "minirl_cap": 0.0, "opsm_delta": 0.0}


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """All settings of one objective. Raises ValueError for an unknown name and for a number out of its bounds.

    Example: `SurrogateSettings.published("dapo", clip_high=0.3)` has DAPO's level (token), clip_low (0.2) and
    length_norm (mean), and clips at 1.3 in place of DAPO's 1.28.
    """

    name: Name
    level: Level  # whose importance ratio is bounded: the token's or the whole sequence's
    clip_low: float  # the range of the ratio is 1 - clip_low … 1 + clip_high; dppo and gmpo give it their own meaning
    clip_high: float
    length_norm: LengthNorm  # what divides the sum over a response's tokens
    dual_clip: float = 3.0  # the most that a ratio counts where Â < 0
    minirl_cap: float = 5.0  # the most that π_θ/π_engine counts
    sapo_temperature: tuple[float, float] = (1.0, 1.05)  # where Â > 0, where Â < 0
    opsm_delta: float | None = None  # the bound on a sequence's mean log(π_engine/π_θ); None: no sequence is dropped

    def __post_init__(self) -> None:
        check_name("surrogate", self.name, tuple(PUBLISHED))
        check_name("level", self.level, LEVELS)
        check_name("length_norm", self.length_norm, get_args(LengthNorm))
        if self.level not in PUBLISHED[self.name].levels:
            raise ValueError(f"{self.name} has no level {self.level}: {ONLY[self.name]}")
        for key, least in _LEAST.items():
            if (value := getattr(self, key)) is not None and not value >= least:
                raise ValueError(f"{key} is {value}: it must be {least:g} or more")

    @classmethod
    def published(cls, name: str = "clip", **changes: Any) -> "SurrogateSettings":
        """The settings that the objective's paper gives, with `changes`; a change to None changes nothing."""
        check_name("surrogate", name, tuple(PUBLISHED))
        published = PUBLISHED[name]  # type: ignore[index]
        changes = {key: value for key, value in changes.items() if value is not None}
        level = changes.setdefault("level", published.level)
        check_name("level", level, LEVELS)
        low, high = published.range(level)
        defaults = {"clip_low": low, "clip_high": high, "length_norm": published.length_norm}
        return cls(**{"name": name, **defaults, **changes})
