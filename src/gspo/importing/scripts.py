"""The settings in a shell script that calls verl and in a Python file that uses TRL, read without running either."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gspo.errors import UserError
from gspo.importing.draft import Computed

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_MAIN = re.compile(r"\s-m\s+[\w.]*main_(?:ppo|dapo)\b(.*)")
_ARRAY = re.compile(r"^[ \t]*(\w+)=\([ \t]*\n(.*?)^[ \t]*\)", re.M | re.S)
_ASSIGNED = re.compile(r"""^[ \t]*(?:export[ \t]+)?(\w+)=("(?:[^"\\]|\\.)*"|.*)""", re.M)
_TOKEN = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<space>\s+)|(?P<end>[|;&<>]|(?<!\S)\#)|\\?"""
    r"(?P<bare>\$\(\(.*?\)\)(?!\))|\$\([^)]*\)|\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\w+|.)",
    re.S,
)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)(?!\))|\$\((?P<command>[^)]*)\)"
    r"|\$\{(?P<name>\w+|@)(?::?[-=](?P<default>(?:[^{}]|\{[^{}]*\})*))?(?P<rest>[^}]*)\}|\$(?P<plain>\w+|[@*])"
)
_UNKNOWN = "\ue000"  # begins what only the shell knows


def shell_words(text: str) -> list[str] | None:
    """The key=value words of verl's call in a script, as the shell passes them on; None where there is no call."""
    text = text.replace("\\\n", "")
    if not (call := _MAIN.search(text)):
        return None
    arrays = {name: re.sub(r"(?m)(^|\s)#.*$", "", body) for name, body in _ARRAY.findall(text)}
    variables = {"HOME": "~", "PWD": ".", "@": "", "*": ""}
    for name, value in _ASSIGNED.findall(_ARRAY.sub("", text[: call.start()])):
        variables[name] = next(_words(value, variables), "")
    rest = re.sub(r'"?\$\{(\w+)\[@\]\}"?', lambda found: arrays.get(found[1], ""), call[1])
    words = [word for word in _words(rest, variables) if re.match(r"\+*[\w.@]+=", word)]
    return [Computed(word.replace(_UNKNOWN, "")) if _UNKNOWN in word else word for word in words]


def _words(text: str, variables: Mapping[str, str]) -> Iterator[str]:
    """The words of a command up to its end: quotes are gone, variables and sums have their values."""
    word = None
    for token in _TOKEN.finditer(text):
        if token["end"]:
            break
        if token["space"]:
            if word is not None:
                yield word
            word = None
            continue
        inner = token["double"] if token["double"] is not None else token["bare"]
        piece = token["single"] if inner is None else _expanded(inner, variables)
        several = token["bare"] and piece.strip() and _UNKNOWN not in piece  # a variable may hold several words
        *before, last = piece.split() if several else [piece]
        for part in before:
            yield (word or "") + part
            word = ""
        word = (word or "") + last
    if word is not None:
        yield word


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found["sum"] is not None:
            named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda part: variables.get(part[1], part[1]), found["sum"])
            total = _sum(named)
            return f"{_UNKNOWN}{found[0]}" if total is None else str(int(total))
        name = found["name"] or found["plain"]
        if found["command"] == "pwd":
            return "."
        if found["command"] is not None or found["rest"]:
            return f"{_UNKNOWN}{found[0]}"
        if name in variables and (variables[name] or found["default"] is None):
            return variables[name]
        return (
            f"{_UNKNOWN}{found[0]}" if found["default"] is None else _expanded(found["default"].strip("\"'"), variables)
        )

    return _EXPANSION.sub(value, text.replace('\\"', '"'))


def _sum(text: str) -> float | None:
    """The value of a sum of numbers; None where a part of it is no number."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, {})
    except (SyntaxError, ValueError, ArithmeticError):
        return None
    return value if isinstance(value, int | float) else None


def python_arguments(text: str, *, where: str) -> dict[str, Any]:
    """The keyword arguments of GRPOConfig, GRPOTrainer and LoraConfig in a Python file; UserError where there are none.

    What is no literal, and no name of one, is Computed. A function is written `module:name`, one of the file `:name`.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        what = f"not valid Python: line {getattr(error, 'lineno', '?')}: {getattr(error, 'msg', error)}"
        raise UserError(what, where=where, fix="name a file that Python can read") from None
    if not {"GRPOConfig", "GRPOTrainer"} & {_name(node) for node in ast.walk(tree)}:
        fix = "name the file that has GRPOConfig(…), or the configuration as YAML or JSON"
        raise UserError("a Python file without GRPOConfig", where=where, fix=fix)
    names = _names(tree)
    found: dict[str, Any] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        prefix = {"GRPOConfig": "", "GRPOTrainer": "", "LoraConfig": "peft_config."}.get(_name(call.func))
        for keyword in call.keywords if prefix is not None else ():
            if not (prefix == "" and keyword.arg in ("args", "peft_config")):
                found[f"{prefix}{keyword.arg or '**'}"] = _literal(keyword.value, names)
    return found


def _name(node: ast.AST) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


def _option(call: ast.Call) -> str:
    """The name in the namespace of what argparse's add_argument adds; empty for other calls."""
    first = call.args[0] if call.args and _name(call.func) == "add_argument" else None
    return str(first.value).lstrip("-").replace("-", "_") if isinstance(first, ast.Constant) else ""


def _names(tree: ast.Module) -> dict[str, Any]:
    """Return what each name of the file means: the node first assigned to it, or `module:name` of a function."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            names |= {f"{name} changed": "changed"} if name in names else {name: node.value}
        elif isinstance(node, ast.Call) and _option(node):
            names |= {f"args.{_option(node)}": word.value for word in node.keywords if word.arg == "default"}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    functions = (node for node in tree.body if isinstance(node, kinds))
    return names | {node.name: f":{node.name}" for node in functions}


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    try:
        return _value(node, names)
    except (ValueError, ArithmeticError, TypeError, RecursionError):
        meant = names.get(node.id) if isinstance(node, ast.Name) else None
        return Computed(ast.unparse(meant if isinstance(meant, ast.AST) else node))


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a literal, a name, an option's default, a sum, or a load_dataset("path"); ValueError for others."""
    if isinstance(node, ast.Attribute) and f"args.{node.attr}" in names:  # the default of an option of the script
        return _value(names[f"args.{node.attr}"], {})
    if isinstance(node, ast.Name) and node.id in names:
        meant = names[node.id]
        others = {name: value for name, value in names.items() if name != node.id}  # a = a ends
        value = meant if isinstance(meant, str) else _value(meant, others)
        return {**value, "changed": True} if isinstance(value, dict) and f"{node.id} changed" in names else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names), _value(node.right, names)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, names) for item in node.elts]
    if isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
        values = [*zip(("path", "config"), (ast.literal_eval(word) for word in node.args), strict=False)]
        return dict(values) | {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
    return ast.literal_eval(node)
