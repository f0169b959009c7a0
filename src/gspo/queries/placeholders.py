"""Texts with the names of columns in braces, filled in; light, since the processes of reward functions import it."""

import re
from collections.abc import Mapping
from typing import Any

from gspo.errors import UserError, listed


def fill_in(text: str, values: Mapping[str, Any], *, key: str, where: str) -> str:
    """The text with the value of each `{name}` in it; braces within values are text.

    UserError, which calls the text by the key that has it, where there is no such value.
    """

    def value(name: re.Match[str]) -> str:
        if values.get(name[1]) is None:
            fix = f"name one of {listed(sorted(values))}"
            raise UserError(f"{key} names {name[0]}, and the row has no such column", where=where, fix=fix)
        return str(values[name[1]])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, text)
