"""What sections of a recipe are made of: bounded numbers, the closed section, and the optimiser that several have."""

import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from gspo.recipe.writable import writable

MAX_NAME_BYTES = 255  # of a file; what file systems take
MAX_PATH_BYTES = 4000  # of a path, with room for what a run writes below it
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of data files
MAX_DRAWN = 2**20  # questions of a procedural task: as many as one seed has before it meets the next

Positive = Annotated[int, Field(gt=0, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
# Responses to one query: more than anyone samples, and few enough for their lists to fit in memory.
NumResponses = Annotated[int, Field(gt=0, le=2**16)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]  # logits divided by less are no numbers
Finite = Annotated[float, Field(allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def path_fault(path: str) -> str | None:
    """Why no file system takes the path; None where there is no such reason."""
    if "\0" in path:
        return "holds a NUL character"
    if writable(path) != path:
        return "holds half of a surrogate pair, which is no character"
    if max(len(name.encode()) for name in path.split("/")) > MAX_NAME_BYTES:
        return f"has a name of more than {MAX_NAME_BYTES} bytes"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"has more than {MAX_PATH_BYTES} bytes"
    return None


def names_file(path: str) -> bool:
    """Whether a path means a local file; anything else, such as `openai/gsm8k`, is a hub id."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
    is_file = os.path.isfile(path)  # noqa: PTH113 - False, not an error, where it may not be looked at
    return looks_local or Path(path).suffix.lower() in FILE_SUFFIXES or is_file


def _usable_path(path: str) -> str:
    if fault := path_fault(path):
        raise PydanticCustomError("fault", "this path {fault}", {"fault": fault})
    return os.path.expanduser(path)  # noqa: PTH111 - Path would make of ./name into name, which may be a hub id


PathText = Annotated[str, AfterValidator(_usable_path)]  # or a hub id


class Section(BaseModel):
    """A frozen part of the recipe; unknown keys are errors and defaults are validated too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_looks_like(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for numbers, which Python takes for 1 and 0, and text that cannot be written."""
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        values = value if isinstance(value, list | tuple) else [value]
        if kinds & {int, float} and bool not in kinds and any(isinstance(item, bool) for item in values):
            raise PydanticCustomError("number", "a number")
        is_section = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
        if not is_section and not _is_encodable(value):
            raise PydanticCustomError("fault", "holds half of a surrogate pair, which is no character")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _kinds(inner)


def _is_encodable(value: Any) -> bool:
    if isinstance(value, str):
        return writable(value) == value
    if isinstance(value, dict):
        return all(_is_encodable(part) for pair in value.items() for part in pair)
    return not isinstance(value, list | tuple) or all(map(_is_encodable, value))


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: Natural = 0  # optimiser steps over which the learning rate rises linearly to lr
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up, down to min_lr_fraction · lr
    min_lr_fraction: Fraction = 0.0
    max_grad_norm: PositiveFloat = 1.0
