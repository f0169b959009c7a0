"""The order of the rooms: a room imports only what stands before it."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import gspo

ROOT = Path(gspo.__file__).parent
ROOMS = "types recipe objective queries model engine rollout sandbox reward learner evaluation metrics run report"
ORDER = [
    *("errors", "interrupt", "loop", "rank_environment"),
    *ROOMS.split(),
    "trackers",
    "train",
    "evaluate",
    "check",
    "init",
    "get",
    "merge",
    "track",
    "launch",
    "importing",
    "cli",
    "__main__",
    "__init__",
]


@cache
def _own_imports(path: Path) -> tuple[ast.ImportFrom, ...]:
    """Where a file imports of the package, within functions, too."""

    def found() -> Iterator[ast.ImportFrom]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gspo":
                yield node

    return tuple(found())


def test_every_room_imports_only_rooms_before_it() -> None:
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in _own_imports(path):
            module = str(node.module).split(".")
            for other in module[1:2] or [alias.name for alias in node.names]:
                assert ORDER.index(other) <= ORDER.index(room), f"{path}:{node.lineno}: {room} imports {other}"


def _imports(path: Path) -> set[str]:
    """The files of the package that a file imports; a name of a room may be a file itself."""
    nodes = _own_imports(path)
    return {str(node.module) for node in nodes} | {f"{node.module}.{own.name}" for node in nodes for own in node.names}


def test_no_files_import_each_other_in_a_circle() -> None:
    names = {path: ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    graph = {name: _imports(path) & set(names.values()) - {name} for path, name in names.items() if path.stem[0] != "_"}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def _rooms_that_import(module: str) -> set[str]:
    return {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py") if module in _imports(path)}


def test_only_the_learner_and_train_know_ranks() -> None:
    assert _rooms_that_import("gspo.learner.ranks") == {"learner", "train.py"}
    assert not {"engine", "rollout"} & _rooms_that_import("gspo.rank_environment")


def test_only_the_doors_import_for_the_type_checker_alone() -> None:
    """It would hide a circle; the package and the command line do it so that `--help` need not wait for torch."""
    hiding = {path.name for path in ROOT.rglob("*.py") if "TYPE_CHECKING" in path.read_text(encoding="utf-8")}
    assert hiding == {"__init__.py", "cli.py"}
