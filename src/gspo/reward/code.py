"""The verdict on the program in a response, which is run on its tests in the sandbox."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
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
from gspo.sandbox.sandbox import Limits, Ran, Sandbox

# What LiveCodeBench puts before each program (its evaluation/testing_util.py); LeetCode's starter code needs it.
_NAMES = "re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
_MODULES = ["string", *_NAMES.split(), "builtins", "typing"]
_IMPORTS = [f"from {name} import *" for name in _MODULES]
_IMPORTS += [f"import {name}" for name in _MODULES if name not in ("builtins", "typing")]
_PRELUDE = "; ".join([*_IMPORTS, "sys.setrecursionlimit(50000)"])  # one line, to be run before each program
_METHOD = "method_of_solution"  # not the method's own name, which the program may have for an import

MAX_VERDICT = 200  # characters
MAX_WASTED = 1.5  # times the wall time of a test, for what a program sleeps and for the CPU time of tests that it fails
SPARE_SECONDS = 0.25  # of each test: to start it on a busy machine is not sleeping


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """The way in which programs are judged; UserError for what an option cannot be.

    Example: JudgeOptions(score="fraction", seconds_per_test=2.0, language="auto", max_tests=15)
    """

    score: str = "all"  # or fraction: of the tests that pass
    seconds_per_test: float = 6.0  # of CPU time
    language: str = "python"  # or cpp, or auto: what the fence names
    max_tests: int | None = None  # the longest ones

    def __post_init__(self) -> None:
        seconds, most = self.seconds_per_test, self.max_tests
        is_seconds = isinstance(seconds, int | float) and 0 < seconds < 1e6
        is_number = most is None or (isinstance(most, int) and most > 0)
        checks = {
            "score": (self.score in ("all", "fraction"), "one of all, fraction"),
            "language": (self.language in ("python", "cpp", "auto"), "one of python, cpp, auto"),
            "seconds_per_test": (is_seconds, "a number of seconds"),
            "max_tests": (is_number, "a number of tests, at least 1"),
        }
        for name, (is_right, accepted) in checks.items():
            if not is_right:
                what = f"{name} is {getattr(self, name)!r}"
                raise UserError(what, where="reward function code, options", fix=f"give {accepted}")


@cache
def sandbox() -> Sandbox:
    """Return this process's sandbox; UserError where the machine cannot isolate programs."""
    return Sandbox(warm=_MODULES)


def try_sandbox() -> None:
    """Run a program in the sandbox; UserError where that does not work."""
    if (ran := sandbox().run("print(7)")).output != b"7\n":
        raise UserError(f"the sandbox does not run programs: {_reason(ran)}", where="reward function code")


def tests_of_rows(
    prompts: Sequence[Any], columns: Mapping[str, Any], tests_column: str | None
) -> list[ProgramTests | None]:
    """Read the tests of each row, once for equal rows in turn; UserError as `read_tests` has it."""
    names = [name for name in (*COLUMNS, tests_column) if name in columns]
    found, row_before = list[ProgramTests | None](), None
    for place, prompt in enumerate(prompts):
        # HumanEval's prompt, where the data has not been laid out
        row: dict[str, Any] = {"code_prompt": prompt} if isinstance(prompt, str) else {}
        row |= {name: columns[name][place] for name in names if name is not None}
        if row == row_before:
            found.append(found[-1])
        else:
            found.append(read_tests(row, column=tests_column, where="reward function code"))
        row_before = row
    return found


def judge(response: str, tests: ProgramTests, options: JudgeOptions) -> tuple[float, str]:
    """Run the response's program on its tests: to the first failure, or on all of them for the fraction it passes.

    Returns the score from 0 to 1 and the reason, such as "wrong answer (test 3 of 7)". Raises UserError where
    the machine cannot isolate programs, and for C++ where it has no g++.
    """
    if options.language == "auto":
        _check_compiler()
    code, tag = extract_code(response)
    if not code and all(isinstance(test, Asserts) for test in tests.tests):
        code = response  # HumanEval's and MBPP's harnesses take the whole response
    if not code.strip():
        return 0.0, "no code"
    language = LANGUAGES.get(tag, "python") if options.language == "auto" else options.language
    program: str | bytes = code
    if (tests.language or language) == "cpp":
        program = sandbox().compile_cpp(code)
        if isinstance(program, str):
            return 0.0, f"does not compile: {program}"[:MAX_VERDICT]
    elif tests.prompt:
        program = _with_prompt(code, tests)
    return _run_tests(program, tests.tests, options)


@cache
def _check_compiler() -> None:
    """Raise UserError where there is no g++, which with `auto` any response may need."""
    sandbox().compile_cpp("int main() {}")


def _run_tests(program: str | bytes, tests: Sequence[CodeTest], options: JudgeOptions) -> tuple[float, str]:
    if options.max_tests is not None:
        tests = sorted(tests, key=_size, reverse=True)[: options.max_tests]
    limits, num_passed, verdict = Limits(cpu_seconds=options.seconds_per_test), 0, ""
    left = MAX_WASTED * limits.wall
    for number, test in enumerate(tests, start=1):
        started = time.monotonic()
        is_right, ran = _run(program, test, limits)
        slept = time.monotonic() - started - 5 * ran.cpu_seconds - SPARE_SECONDS  # with a fifth of a core, as Limits
        left -= max(slept, 0) + (0 if is_right else ran.cpu_seconds)
        num_passed += is_right
        if not is_right:
            verdict = verdict or f"{_reason(ran)} (test {number} of {len(tests)})"[:MAX_VERDICT]
        if left < 0 or (verdict and options.score == "all"):  # the rest count as failed
            break
    if num_passed == len(tests):
        return 1.0, "passed"
    score = num_passed / len(tests) if options.score == "fraction" else 0.0
    return score, verdict or f"wall_time of all tests (test {number} of {len(tests)})"


def _size(test: CodeTest) -> int:
    if isinstance(test, InputOutput):
        return len(test.input)
    return len(test.text) if isinstance(test, Asserts) else len(str(test.arguments))


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
    """Put LiveCodeBench's imports before the program, without the one that has the name `hidden`."""
    hiding = f"; {hidden} = None" if hidden else ""
    return code if re.search(r"^from __future__", code, re.MULTILINE) else f"{_PRELUDE}{hiding}\n{code}"


def _call(code: str, test: FunctionCall, limits: Limits) -> Ran:
    """Call the program's function, or the method of its class Solution; never one of the imports, such as math.gcd."""
    if re.search(r"^class Solution\b", code, re.MULTILINE):
        source = _with_imports(f"{code}\n\n{_METHOD} = Solution().{test.function}\n")
        return sandbox().call(source, _METHOD, test.arguments, limits)
    return sandbox().call(_with_imports(code, hidden=test.function), test.function, test.arguments, limits)


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
    return ran.ending == "finished" and any(_same_value(ran.value, value) for value in test.values), ran


def _same_value(value: object, expected: object) -> bool:
    """Compare as LiveCodeBench does: a tuple is as good as a list."""
    try:
        return (list(value) if isinstance(value, tuple) else value) == expected
    except RecursionError:  # nested without end
        return False


def _reason(ran: Ran) -> str:
    if ran.ending == "finished":
        return "wrong answer"
    last_line = (ran.error.strip().splitlines() or [""])[-1]
    return f"{ran.ending}: {last_line}" if ran.ending == "failed" and last_line else ran.ending
