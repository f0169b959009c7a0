"""The tests of a program, read from a row of data in any of the layouts that docs/guides/rewards.md lists."""

import ast
import binascii
import builtins
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.errors import UserError

Language = Literal["python", "cpp"]
LANGUAGES: Mapping[str, Language] = {"python": "python", "python3": "python", "cpp": "cpp", "c++": "cpp"}

# What says where a row's tests are, by precedence: MBPP, HumanEval, LiveCodeBench, PrimeIntellect, then columns with
# tests in a form that is recognised by itself.
TEST_COLUMNS = (
    *("test_list", "test", "public_test_cases", "private_test_cases", "verification_info", "tests"),
    *("input_output", "reward_model", "ground_truth"),
)
# What is read beside them.
COLUMNS = (*TEST_COLUMNS, "entry_point", "code_prompt", "test_setup_code", "test_imports", "metadata")

MAX_BYTES = 2**29  # unpacked; a worker may take 4 GiB

# Of a pickle.
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
# A version, a length, a place to remember the text at, the end: none of them makes or calls an object.
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


@dataclass(frozen=True, kw_only=True)
class InputOutput:
    """A program that reads the input must write the output."""

    input: str
    output: str


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A function called with the arguments must return one of the values."""

    function: str
    arguments: Sequence[Any]
    values: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Asserts:
    """A text of Python that must run to its end; the functions are the program's."""

    text: str
    functions: Sequence[str]


CodeTest = InputOutput | FunctionCall | Asserts


@dataclass(frozen=True, kw_only=True)
class ProgramTests:
    """The tests that a program has to pass, and what is known of it.

    Example: read_tests({"tests": [{"input": "1 2", "output": "3"}]}) is
    ProgramTests(tests=(InputOutput(input="1 2", output="3"),))
    """

    tests: Sequence[CodeTest]
    language: Language | None = None  # that the row asks for
    prompt: str = ""  # HumanEval's: the beginning of the program, which a completion goes on with
    helpers: str = ""  # what the prompt defines besides the function that is asked for


def read_tests(row: Mapping[str, Any], *, column: str | None = None, where: str) -> ProgramTests | None:
    """The tests of a row, from the `column` or from those of a known layout; None where the row has an empty one.

    `where` is what an error is about. Raises UserError where there is no such column or what it holds is malformed.
    """
    names = [name for name in ([column] if column else TEST_COLUMNS) if name in row]
    if not names:
        what = f"it needs a column {column!r}" if column else "the row has no column with tests in a known layout"
        what += f"; the columns there are: {', '.join(row) or 'none'}"
        raise UserError(what, where=where, fix="name the column: options: {tests_column: …}")
    if (name := next((name for name in names if not is_blank(row[name])), None)) is None:
        return None
    try:
        tests = _read_layout(name, row)
        if not tests.tests:
            raise ValueError("no test")
        return tests
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        fix = "correct the row or leave it out; docs/guides/rewards.md shows the layouts"
        raise UserError(f"column {name!r} holds no usable tests: {reason}", where=where, fix=fix) from None


def is_blank(value: Any) -> bool:
    """Tell whether a cell holds nothing: null, white space, NaN (an empty cell of Parquet), an empty list."""
    is_nan, is_space = isinstance(value, float) and value != value, isinstance(value, str) and not value.strip()
    return value is None or is_nan or is_space or value in ([], ())


def _read_layout(name: str, row: Mapping[str, Any]) -> ProgramTests:
    value = row[name]
    if name == "test_list":
        return ProgramTests(tests=_mbpp_tests(value, row))
    if name == "test" and isinstance(value, str) and row.get("entry_point"):
        return _human_eval_tests(value, row)
    if name in ("public_test_cases", "private_test_cases"):
        cases = [case for column in ("public_test_cases", "private_test_cases") for case in _cases(row.get(column))]
        return ProgramTests(tests=_read_cases(cases, row))
    if name == "reward_model" and isinstance(value, Mapping):
        value = value["ground_truth"]
    return _read_value(value, row)


def _cases(value: Any) -> list[Any]:
    """LiveCodeBench's list: itself, JSON, or JSON that is packed."""
    if isinstance(value, str) and value.strip():
        value = json.loads(value if value.lstrip().startswith("[") else unpack(value))
    return list(value or [])


def _read_value(value: Any, row: Mapping[str, Any]) -> ProgramTests:
    """Tests in any form: a list, a mapping, JSON (or Python's literals) of either, or a text of asserts."""
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "{")):
            return ProgramTests(tests=[_asserts(value)])
        try:
            value = json.loads(value)
        except ValueError:
            value = ast.literal_eval(value)
    if isinstance(value, Mapping) and "test_cases" in value:
        language = value.get("language")
        if language is not None and str(language).lower() not in LANGUAGES:
            raise ValueError(f"the language is {language}; programs in {', '.join(LANGUAGES)} can be run")
        tests = _read_cases(value["test_cases"], row)
        return ProgramTests(tests=tests, language=LANGUAGES.get(str(language).lower()))
    if isinstance(value, Mapping):
        return ProgramTests(tests=_apps_tests(value))
    if not isinstance(value, Sequence):
        raise ValueError(f"{str(value)[:60]!r} is neither a list nor a mapping nor a text")
    if all(isinstance(entry, str) for entry in value):
        return ProgramTests(tests=[_asserts(entry) for entry in value])
    return ProgramTests(tests=_read_cases(value, row))


def _apps_tests(value: Mapping[str, Any]) -> list[CodeTest]:
    """The tests of APPS, TACO, DeepCoder and verl: lists of inputs and outputs, and perhaps a function's name."""
    function, inputs, outputs = value.get("fn_name"), value["inputs"], value["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    named = {"type": "function_call", "fn_name": function} if function else {}
    return _read_cases([{"input": i, "output": o, **named} for i, o in zip(inputs, outputs, strict=True)], {})


def _read_cases(cases: Sequence[Any], row: Mapping[str, Any]) -> list[CodeTest]:
    """A test for each mapping of a list, such as {"input": "1 2", "output": "3"}."""
    # APPS wraps a function's value in a list of one; that shows in all tests of a row or in none.
    mappings = [case for case in cases if isinstance(case, Mapping)]
    values = [case.get("output") for case in mappings if isinstance(case.get("input"), list)]
    is_wrapped = all(isinstance(value, list) and len(value) == 1 for value in values)
    return [_read_case(case, row, is_wrapped=is_wrapped) for case in cases]


def _read_case(case: Any, row: Mapping[str, Any], *, is_wrapped: bool) -> CodeTest:
    if not isinstance(case, Mapping):
        raise ValueError(f"a test is {str(case)[:60]!r}, not a mapping")
    is_call = case.get("testtype") == "functional" or case.get("type") == "function_call" or "function" in case
    if not is_call:
        return InputOutput(input=_lines(case["input"]), output=_lines(case["output"]))
    function = case.get("function") or case.get("fn_name") or _function_name(case) or _function_name(row)
    if not (isinstance(function, str) and function.isidentifier()):
        raise ValueError("a test calls a function and does not name it")
    if "arguments" in case:
        arguments, values = case["arguments"], [case["output"]]
    elif isinstance(case["input"], str):  # LiveCodeBench's: a JSON value a line
        arguments = [json.loads(line) for line in case["input"].split("\n")]
        values = [json.loads(case["output"])]
    else:
        arguments, values = case["input"], [case["output"], *(case["output"] if is_wrapped else ())]
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of a function are {str(arguments)[:60]!r}, not a list")
    return FunctionCall(function=function, arguments=arguments, values=values)


def _function_name(holder: Mapping[str, Any]) -> Any:
    """LiveCodeBench's `metadata`: a mapping or JSON of one."""
    metadata = holder.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _lines(value: Any) -> str:
    """Standard input or output: text, or a list of its lines, as some rows of APPS have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{str(value)[:60]!r} is no text")


def _mbpp_tests(value: Any, row: Mapping[str, Any]) -> list[CodeTest]:
    """An assert each, behind the row's imports and its setup code."""
    if isinstance(value, str) or not all(isinstance(entry, str) for entry in value):
        raise ValueError("the tests are no list of texts")
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
    return [_asserts(entry, setup=setup) for entry in value]


def _human_eval_tests(test: str, row: Mapping[str, Any]) -> ProgramTests:
    """`test` defines check(candidate); the functions that the prompt defines besides are there for it."""
    function, prompt = row["entry_point"], row.get("code_prompt") or ""
    try:
        tree = ast.parse(prompt)
    except SyntaxError:  # a question in words
        prompt, tree = "", ast.Module(body=[], type_ignores=[])
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == function)]
    helpers = ast.unparse(tree)
    asserts = Asserts(text=f"{helpers}\n\n{test}\n\ncheck({function})\n", functions=(function,))
    return ProgramTests(tests=[asserts], prompt=prompt, helpers=helpers)


def _asserts(text: str, *, setup: str = "") -> Asserts:
    """The program's functions are the names that the text uses, and that neither it nor Python defines."""
    text = f"{setup}\n{text}".strip()
    used, defined = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
    if not used - defined:
        raise ValueError(f"a text that calls no function of the program: {text[:60]!r}")
    return Asserts(text=text, functions=sorted(used - defined))


def unpack(packed: str, max_bytes: int = MAX_BYTES) -> str:
    """The text of LiveCodeBench's private tests, which was pickled, compressed by zlib and written as base64.

    Raises ValueError where it is damaged, holds anything but one text, or would have more than `max_bytes` bytes.
    """
    try:
        compressed = binascii.a2b_base64(packed.encode("ascii"), strict_mode=True)
        stream = zlib.decompressobj()
        pickled = stream.decompress(compressed, max_bytes)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"neither JSON nor base64 of zlib's format: {error}") from None
    if not stream.eof:
        raise ValueError(f"it is cut off, or more than {max_bytes:,} bytes when it is unpacked")
    return unpickle_text(pickled)


def unpickle_text(pickled: bytes) -> str:
    """The one text that a pickle holds, read by its instructions, of which none is carried out.

    Raises ValueError for a pickle of anything else, and for a damaged one.
    """
    texts: list[str] = []
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name in _TEXT:
            texts.append(str(argument))
        elif instruction.name not in _HARMLESS:
            raise ValueError(f"a pickle of more than a text: it has the instruction {instruction.name}")
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} texts, not of one")
    return texts[0]
