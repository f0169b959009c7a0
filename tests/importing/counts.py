"""Count what becomes of the keys of files: python tests/importing/counts.py FILE … prints a line of a table."""

import sys
from collections import Counter
from pathlib import Path

from gspo.errors import UserError
from gspo.importing.draft import CATEGORIES, WHERE
from gspo.importing.write import categories_of

COMPUTED = "it is computed by the program"


def counts(paths: list[Path]) -> tuple[Counter[str], list[str]]:
    """How many keys of all files are in each category, and which files are refused."""
    found, refused = Counter[str](), list[str]()
    for path in paths:
        try:
            for category, words in categories_of(path).values():
                found["computed" if words.startswith(COMPUTED) else category] += 1
        except UserError as error:
            refused.append(f"{path.name}: {error.what}")
    return found, refused


if __name__ == "__main__":
    files = [Path(word) for word in sys.argv[1:]]
    found, refused = counts(files)
    names = [*CATEGORIES[:4], "computed", CATEGORIES[-1]]
    matter = sum(found[name] for name in names)
    answered = matter - found[CATEGORIES[-1]]
    cells = [len(files) - len(refused), found[WHERE], matter, *(found[name] for name in names)]
    print(" | ".join(map(str, [*cells, f"{answered / matter:.1%}"])))
    print("\n".join(refused))
