"""python extract_sglang_classes.py sglang-….whl > sglang_classes.json: names, types and defaults in SGLang's source.

Of its options and its paths there are those that gspo names.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

CLASSES = ["GenerateReqInput", "UpdateWeightFromDiskReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput"]
CLASSES += ["SamplingParams", "GenerateResponse", "GenerateMetaInfo", "WeightVersionSpan", "LogprobEntry"]
CLIENT = Path(__file__).parents[3] / "src/gspo/engine/server/sglang.py"


def nodes(archive: zipfile.ZipFile, *paths: str) -> list[ast.AST]:
    """All nodes of some of the wheel's files; nothing is imported."""
    return [node for path in paths for node in ast.walk(ast.parse(archive.read(path)))]


def fields(node: ast.ClassDef) -> dict[str, str]:
    """Name -> annotation and default of a class's fields, without the help texts of options."""
    return {
        ast.unparse(item.target): f"{_type(item.annotation)}{f' = {ast.unparse(item.value)}' if item.value else ''}"
        for item in node.body
        if isinstance(item, ast.AnnAssign)
    }


def _type(annotation: ast.expr) -> str:
    is_option = isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated")
    return ast.unparse(annotation.slice.elts[0] if is_option else annotation)  # type: ignore[attr-defined]


def texts(found: Iterable[ast.AST]) -> list[str]:
    """The names among the string constants within."""
    inner = (item.value for node in found for item in ast.walk(node) if isinstance(item, ast.Constant))
    return sorted({value for value in inner if isinstance(value, str) and value.isidentifier()})


def main(wheel: Path) -> None:
    """Print it."""
    archive, srt, client = zipfile.ZipFile(wheel), "sglang/srt/", CLIENT.read_text()
    groups = [path for path in archive.namelist() if path.startswith(f"{srt}arg_groups/fields/")]
    contract = nodes(archive, "sglang/api/v1/api_types.py")
    server = nodes(archive, f"{srt}entrypoints/http_server.py", f"{srt}managers/scheduler.py")
    written = nodes(archive, f"{srt}managers/tokenizer_manager.py")
    classes = [n for n in nodes(archive, f"{srt}managers/io_struct.py") + contract if isinstance(n, ast.ClassDef)]
    ends = [n for n in nodes(archive, f"{srt}managers/schedule_batch.py") if isinstance(n, ast.ClassDef)]
    aliases = [n for n in contract if isinstance(n, ast.Assign) and n.col_offset == 0]
    paths = [f"'/{name}'" for name in re.findall(r'"/?(\w+)"', client)]
    handlers = [n for n in server if isinstance(n, ast.AsyncFunctionDef)]
    routes = {ast.unparse(route): ast.unparse(n.args) for n in handlers for route in n.decorator_list}
    options = [item for n in nodes(archive, *groups) if isinstance(n, ast.ClassDef) for item in fields(n).items()]
    found = {
        "source": f"{wheel.name}: io_struct, api_types, http_server, scheduler, tokenizer_manager, arg_groups/fields",
        "aliases": {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in aliases},
        "classes": {n.name: fields(n) for n in classes if n.name in CLASSES},
        "routes": {route: body for route, body in routes.items() if any(name in route for name in paths)},
        "finish_reasons": {n.name: texts(n.body[-1:]) for n in ends if n.name.startswith("FINISH_")},
        "meta_info": texts(n.slice for n in written if isinstance(n, ast.Subscript) and "meta_info" in ast.unparse(n)),
        "server_info": texts(n for n in server if getattr(n, "name", "") in ("server_info", "get_init_info")),
        "options": {name: text for name, text in options if name in client.replace("api-key", "api_key")},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
