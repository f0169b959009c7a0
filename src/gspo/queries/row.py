"""A row of data before the tokenizer: the prompt, and the columns that go to the reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.records import Messages


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question as the data has it."""

    id: str  # "<source>:<row number>", counted from 1
    prompt: str | Messages
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_procedural: bool = False  # made by reasoning-gym itself, not read from data

    @property
    def prompt_key(self) -> str:
        """A string that is equal for equal prompts: to keep held-out questions out of training."""
        return self.prompt if isinstance(self.prompt, str) else repr(self.prompt)
