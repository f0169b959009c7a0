"""The built-in reward `code`: the program in a response is run on its tests in the sandbox."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from itertools import groupby
from typing import Any

from gspo.errors import UserError
from gspo.reward.code_tests import (
    COLUMNS,
    LANGUAGES,
    Asserts,
    CodeTest,
    FunctionCall,
    InputOutput,
    ProgramTests,
    read_tests,
)
from gspo.reward.marks import judges_behind_thoughts
from gspo.sandbox.sandbox import Limits, Ran, Sandbox

# What LiveCodeBench puts before each program (its evaluation/testing_util.py); LeetCode's starter code needs it.
_NAMES = "re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
_MODULES = ["string", *_NAMES.split(), "builtins", "typing"]
_IMPORTS = [f"from {name} import *" for name in _MODULES]
_IMPORTS += [f"import {name}" for name in _MODULES if name not in ("builtins", "typing")]
_PRELUDE = "; ".join([*_IMPORTS, "sys.setrecursionlimit(50000)"])  # one line, to be run before each program
# After a program: the function, or the method of its class Solution. Its name was None in the place of an import, which
# is not the program's, and which methods may use.
_FIND = """

if globals().get("{name}") is None:
    {name}, gspo_function = globals().get("gspo_function"), None
else:
    gspo_function = {name}
if "Solution" in globals() and (gspo_function is None or hasattr(Solution, "{name}")):
    gspo_function = getattr(Solution(), "{name}")
if gspo_function is None:
    raise NameError("name '{name}' is not defined")
"""

MAX_VERDICT = 200  # characters
MAX_WASTED = 1.5  # times the wall time of a test, for what a program sleeps and for the CPU time of tests that it fails
SPARE_SECONDS = 0.25  # of each test: to start it on a busy machine is not sleeping


_ACCEPTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "score": ("one of all, fraction", lambda value: value in ("all", "fraction")),
    "language": ("one of python, cpp, auto", lambda value: value in ("python", "cpp", "auto")),
    "seconds_per_test": ("a number of seconds", lambda value: isinstance(value, int | float) and 0 < value < 1e6),
    "max_tests": ("a number, at least 1", lambda value: value is None or (isinstance(value, int) and value > 0)),
}


@judges_behind_thoughts
def code(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    tests_column: str | None = None,
    score: str = "all",
    seconds_per_test: float = 6.0,
    language: str = "python",
    max_tests: int | None = None,
    log_extra: Callable[[str, Any], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the program in the completion passes the row's tests (or the fraction it passes), in the sandbox.

    0.0 where there is no program or it takes more CPU seconds; None where the row's tests are empty.
    Raises UserError for malformed tests, and where the machine cannot isolate programs.
    """
    options: dict[str, Any] = {
        "score": score,
        "seconds_per_test": seconds_per_test,
        "language": language,
        "max_tests": max_tests,
    }
    for name, (accepted, is_right) in _ACCEPTED.items():
        if not is_right(options[name]):
            what = f"{name} is {options[name]!r}"
            raise UserError(what, where="reward function code, options", fix=f"give {accepted}")
    judgements = [
        (None, None) if tests is None else _judge(completion, tests, **options)
        for completion, tests in zip(completions, _tests_of_rows(prompts, columns, tests_column), strict=True)
    ]
    if log_extra is not None:
        log_extra("verdict", [verdict for _, verdict in judgements])
    return [reward for reward, _ in judgements]


@cache
def sandbox() -> Sandbox:
    """Return this process's sandbox; UserError where the machine cannot isolate programs."""
    return Sandbox(warm=_MODULES)


def try_sandbox() -> None:
    """Run a program in the sandbox; UserError where that does not work."""
    if (ran := sandbox().run("print(7)")).output != b"7\n":
        raise UserError(f"the sandbox does not run programs: {_reason(ran)}", where="reward function code")


def _tests_of_rows(
    prompts: Sequence[Any], columns: Mapping[str, Any], tests_column: str | None
) -> list[ProgramTests | None]:
    """Read the tests of each row, once for equal rows in turn; UserError as `read_tests` has it."""
    names = [name for name in (*COLUMNS, tests_column or "") if name in columns]
    rows, found = list[dict[str, Any]](), list[ProgramTests | None]()
    for place, prompt in enumerate(prompts):
        # HumanEval's prompt, where the data has not been laid out
        own = {"code_prompt": prompt} if isinstance(prompt, str) else {}
        rows.append({**own, **{name: columns[name][place] for name in names}})
    for row, equal in groupby(rows):
        found += [read_tests(row, column=tests_column, where="reward function code")] * len([*equal])
    return found


def _judge(
    response: str, tests: ProgramTests, *, score: str, seconds_per_test: float, language: str, max_tests: int | None
) -> tuple[float, str]:
    """Run the response's program on its tests: to the first failure, or on all of them for the fraction it passes.

    Returns the score from 0 to 1 and the reason, such as "wrong answer (test 3 of 7)". Raises UserError where
    the machine cannot isolate programs, and for C++ where it has no g++.
    """
    if language == "auto":
        _check_compiler()
    code, tag = extract_code(response)
    if not code and all(isinstance(test, Asserts) for test in tests.tests):
        code = response  # HumanEval's and MBPP's harnesses take the whole response
    if not code.strip():
        return 0.0, "no code"
    in_fence = LANGUAGES.get(tag, "python") if language == "auto" else language
    program: str | bytes = code
    if (tests.language or in_fence) == "cpp":
        program = sandbox().compile_cpp(code)
        if isinstance(program, str):
            return 0.0, f"does not compile: {program}"[:MAX_VERDICT]
    elif tests.prompt:
        program = _with_prompt(code, tests)
    return _run_tests(program, _longest(tests.tests, max_tests), seconds_per_test, score)


@cache
def _check_compiler() -> None:
    """Raise UserError where there is no g++, which with `auto` any response may need."""
    sandbox().compile_cpp("int main() {}")


def _run_tests(program: str | bytes, tests: Sequence[CodeTest], seconds: float, score: str) -> tuple[float, str]:
    limits, num_passed, verdict = Limits(cpu_seconds=seconds), 0, ""
    left = MAX_WASTED * limits.wall
    for number, test in enumerate(tests, start=1):
        started = time.monotonic()
        is_right, ran = _run(program, test, limits)
        slept = time.monotonic() - started - 5 * ran.cpu_seconds - SPARE_SECONDS  # with a fifth of a core, as Limits
        left -= max(slept, 0) + (0 if is_right else ran.cpu_seconds)
        num_passed += is_right
        if not is_right:
            verdict = verdict or f"{_reason(ran)} (test {number} of {len(tests)})"[:MAX_VERDICT]
        if left < 0 or (verdict and score == "all"):  # the rest count as failed
            break
    if num_passed == len(tests):
        return 1.0, "passed"
    share = num_passed / len(tests) if score == "fraction" else 0.0
    return share, verdict or f"wall_time of all tests (test {number} of {len(tests)})"


def _longest(tests: Sequence[CodeTest], number: int | None) -> Sequence[CodeTest]:
    def size(test: CodeTest) -> int:
        if isinstance(test, InputOutput):
            return len(test.input)
        return len(test.text) if isinstance(test, Asserts) else len(str(test.arguments))

    return tests if number is None else sorted(tests, key=size, reverse=True)[:number]


def extract_code(response: str) -> tuple[str, str]:
    """Return the lines between the last two that hold a fence, ```, and the language that the first names.

    Both texts are empty where there are fewer than two fences. This is LiveCodeBench's rule
    (its utils/extraction_utils.py).
    """
    lines = response.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    if len(fences) < 2:
        return "", ""
    tag = lines[fences[-2]].rpartition("```")[2].strip().lower()
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]), tag


def same_output(output: str, expected: str) -> bool:
    """Compare two outputs by line: the same text, or the same numbers, without the space around them.

    Numbers are compared exactly: 1.0 is 1, and 0.333 is not 1/3. This is LiveCodeBench's rule (testing_util.py).
    """
    pairs = [[line.strip() for line in text.strip().split("\n")] for text in (output, expected)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_same_line, *pairs))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    tokens, expected_tokens = line.split(), expected.split()
    if len(tokens) != len(expected_tokens):
        return False
    try:
        return all(Decimal(token) == Decimal(other) for token, other in zip(tokens, expected_tokens, strict=True))
    except ArithmeticError:  # a word
        return False


def _with_prompt(code: str, tests: ProgramTests) -> str:
    """Put HumanEval's prompt before the code, unless the response has the whole function."""
    (asked,) = (function for test in tests.tests if isinstance(test, Asserts) for function in test.functions)
    is_whole = any(line.startswith((f"def {asked}(", f"async def {asked}(")) for line in code.split("\n"))
    return f"{tests.helpers}\n\n{code}" if is_whole else f"{tests.prompt}{code}"


def _with_imports(code: str, hidden: str = "") -> str:
    """Put LiveCodeBench's imports before the program; one of the name `hidden` is gspo_function until _FIND."""
    hiding = f"; gspo_function = globals().get('{hidden}'); {hidden} = None" if hidden else ""
    return code if re.search(r"^from __future__", code, re.MULTILINE) else f"{_PRELUDE}{hiding}\n{code}"


def _call(code: str, test: FunctionCall, limits: Limits) -> Ran:
    """Call the program's function, or the method of its class Solution; never one of the imports, such as math.gcd."""
    source = _with_imports(code, hidden=test.function) + _FIND.format(name=test.function)
    return sandbox().call(source, "gspo_function", test.arguments, limits)


def _run(program: str | bytes, test: CodeTest, limits: Limits) -> tuple[bool, Ran]:
    """Run the program on the test; return whether it passes, and the run."""
    if isinstance(test, InputOutput):
        program = program if isinstance(program, bytes) else _with_imports(program)
        ran = sandbox().run(program, test.input.encode(errors="replace"), limits)
        return ran.ending == "finished" and same_output(ran.output.decode(errors="replace"), test.output), ran
    if isinstance(program, bytes):
        return False, Ran(ending="failed", output=b"", error="a function is called in Python only")
    if isinstance(test, Asserts):
        ran = sandbox().check(program, test.text, test.functions, limits)
        return ran.ending == "finished", ran
    ran = _call(program, test, limits)
    value = list(ran.value) if isinstance(ran.value, tuple) else ran.value  # as good to LiveCodeBench
    return ran.ending == "finished" and value in test.values, ran


def _reason(ran: Ran) -> str:
    if ran.ending == "finished":
        return "wrong answer"
    last_line = (ran.error.strip().splitlines() or [""])[-1]
    return f"{ran.ending}: {last_line}" if ran.ending == "failed" and last_line else ran.ending
