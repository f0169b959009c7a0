"""Programs earn their reward by passing tests in the sandbox: right ones, and no others, whatever they try."""

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from tests.needs import needs
from tests.samples import scores_of

from gspo.errors import UserError
from gspo.queries.row import lay_out
from gspo.recipe.sections import RewardConfig
from gspo.reward.builtin import code
from gspo.reward.code import extract_code, same_output
from gspo.reward.functions import close_functions, fit_to_rows, load_functions
from gspo.reward.score import score
from gspo.sandbox.sandbox import Limits, Ran, Sandbox


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("\n  1 2 \r\n 3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1", False),
        ("1.0", "1", True),
        ("1.50 2e3", "1.5  2000", True),
        ("0.1", "0.10000000000000001", False),
        ("50000000000000000", "50000000000000001", False),
        ("007", "7", True),
        ("YES", "yes", False),
        ("YES  1", "YES 1", False),  # a word in the line: as text
        ("case 1.0", "case 1", False),
        ("nan", "nan", True),
        ("nan 1", "nan 1.0", False),
        ("sNaN 1", "sNaN 1.0", False),
        ("inf", "Infinity", True),
        ("1e999999999", "1", False),
        ("", "", True),
        ("\n", "", True),
        ("", "0", False),
        ("٣", "3", True),  # what Decimal reads
    ],
)
def test_outputs_are_compared_as_livecodebench_does(output: str, expected: str, is_same: bool) -> None:
    assert same_output(output, expected) == is_same


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        ("a\n```python\nx\ny\n```\nb", ("x\ny", "python")),
        ("```\nfirst\n```\n```C++\nlast\n```", ("last", "c++")),
        ("```python\nx", ("", "")),
        ("x", ("", "")),
        ("```x```", ("", "")),
        ("```python\nx\n```\n```", ("", "")),  # the last two lines that have a fence
        ("  ```py\n  x\n  ```", ("  x", "py")),
        ("", ("", "")),
    ],
)
def test_the_last_fenced_block_is_the_program(response: str, extracted: tuple[str, str]) -> None:
    assert extract_code(response) == extracted


def fenced(program: str, tag: str = "python") -> str:
    return f"So:\n```{tag}\n{program}\n```\nDone."


def scored(programs: list[str], row: dict[str, Any], **options: Any) -> list[float | None]:
    columns: dict[str, Any] = {name: [value] * len(programs) for name, value in row.items()}
    return code(["q"] * len(programs), [fenced(program) for program in programs], **columns, **options)


STDIN_RIGHT = "a, b = map(int, input().split())\nprint(a + b)"
STDIN_WRONG = "a, b = map(int, input().split())\nprint(a - b)"
STDIN_CHEATS = "import os\nprint(5, flush=True)\nos._exit(0)"
CALL_RIGHT = "class Solution:\n    def add(self, numbers: List[int]) -> int:\n        return sum(numbers)"
CALL_WRONG = "def add(numbers):\n    return max(numbers)"
CALL_CHEATS = (
    "class Equal(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
    "def add(numbers):\n    return Equal(0)"
)
ASSERT_RIGHT = "def add(numbers):\n    return sum(numbers)"
STDIN = [{"input": "2 3\n", "output": "5\n"}, {"input": "4 4\n", "output": "8\n"}]
CALLS = [{"input": "[2, 3]", "output": "5"}, {"input": "[4, 4]", "output": "8"}]
PUBLIC = [{**case, "testtype": "stdin"} for case in STDIN]
PRIVATE = [{**case, "testtype": "functional"} for case in CALLS]
INPUTS, OUTPUTS = ["2 3\n", "4 4\n"], ["5\n", "8\n"]
ASSERTS = ["assert add([2, 3]) == 5", "assert add([4, 4]) == 8"]
BY_INPUT = (STDIN_RIGHT, STDIN_WRONG, STDIN_CHEATS)
BY_CALL = (CALL_RIGHT, CALL_WRONG, CALL_CHEATS)
BY_ASSERT = (ASSERT_RIGHT, CALL_WRONG, CALL_CHEATS)
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "stdin": ({"tests": STDIN}, BY_INPUT),
    "function": (
        {"tests": [{"function": "add", "arguments": [[2, 3]], "output": 5}] * 2},
        BY_CALL,
    ),
    "asserts": ({"tests": "\n".join(ASSERTS)}, BY_ASSERT),
    "LiveCodeBench, stdin": ({"public_test_cases": json.dumps(PUBLIC), "private_test_cases": "[]"}, BY_INPUT),
    "LiveCodeBench, functional": (
        {
            "public_test_cases": "[]",
            "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode(),
            "metadata": '{"func_name": "add"}',
        },
        BY_CALL,
    ),
    "PrimeIntellect": (
        {
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{**case, "type": "stdin_stdout"} for case in STDIN]}
            )
        },
        BY_INPUT,
    ),
    "PrimeIntellect, function": (
        {
            "verification_info": {
                "test_cases": [{"type": "function_call", "fn_name": "add", "input": [[2, 3]], "output": [5]}]
            }
        },
        BY_CALL,
    ),
    "DeepCoder": ({"tests": json.dumps({"inputs": [[[2, 3]]], "outputs": [5], "fn_name": "add"})}, BY_CALL),
    "verl": ({"reward_model": {"ground_truth": json.dumps({"inputs": INPUTS, "outputs": OUTPUTS})}}, BY_INPUT),
    "MBPP": ({"test_list": ASSERTS, "test_setup_code": ""}, BY_ASSERT),
    "HumanEval": (
        {
            "code_prompt": 'def twice(x):\n    return 2 * x\n\ndef add(numbers):\n    """Adds."""\n',
            "entry_point": "add",
            "test": "def check(add):\n    assert add([2, 3]) == 5\n    assert add([4, 4]) == twice(4)\n",
        },
        BY_ASSERT,
    ),
}


@needs("sandbox")
@pytest.mark.parametrize(("row", "programs"), LAYOUTS.values(), ids=LAYOUTS)
def test_of_each_layout_right_programs_are_rewarded_and_no_others(
    row: dict[str, Any], programs: tuple[str, str, str]
) -> None:
    assert scored([*programs, "syntax error", "import sys\nsys.exit(0)"], row) == [1.0, 0.0, 0.0, 0.0, 0.0]


HUMAN_EVAL = LAYOUTS["HumanEval"][0]


@needs("sandbox")
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("    return sum(numbers)\n", 1.0),  # the prompt's completion
        (fenced("    return sum(numbers)"), 1.0),
        (fenced("def add(numbers):\n    return sum(numbers) + twice(0)"), 1.0),  # a helper of the prompt
        ("    return 5\n", 0.0),
    ],
)
def test_human_evals_response_may_go_on_with_the_prompt(response: str, reward: float) -> None:
    columns: dict[str, Any] = {name: [value] for name, value in HUMAN_EVAL.items()}
    assert code(["q"], [response], **columns) == [reward]
    prompt = columns.pop("code_prompt")
    assert code(prompt, [response], **columns) == [reward]  # the data as it is


@needs("sandbox")
def test_a_tuple_is_as_good_as_a_list_and_a_number_as_its_equal() -> None:
    row = {"tests": [{"function": "f", "arguments": [], "output": [1, 2]}]}
    programs = ["def f(): return (1, 2.0)", "def f(): return [1, 2]", "def f(): return '[1, 2]'", "f = 7"]
    assert scored(programs, row) == [1.0, 1.0, 0.0, 0.0]


@needs("sandbox")
def test_a_function_must_be_the_programs_own_not_one_of_the_imports_before_it() -> None:
    row = {"tests": [{"function": "gcd", "arguments": [4, 6], "output": 2}]}
    method = "class Solution:\n    def gcd(self, a: int, b: int) -> int:\n        return gcd(a, b)"
    held = "class Solution:\n    def __init__(self):\n        self.gcd = lambda a, b: gcd(a, b)"
    responses = ["x = 1", "import math\ngcd = math.gcd", method, "class Solution: pass", held]
    assert scored(responses, row) == [0.0, 1.0, 1.0, 0.0, 1.0]


@needs("sandbox")
@pytest.mark.parametrize(
    "program",
    [
        "class Solution:\n    def twice(self, x):\n        return 2 * x\ndef solve(x):\n    return Solution().twice(x)",
        "class Solution:\n    def __init__(self, x):\n        self.x = x\ndef solve(x):\n    return 2 * Solution(x).x",
        'def solve(x):\n    """It is not in a\nclass Solution:\n    """\n    return 2 * x',
        "if True:\n    class Solution:\n        def solve(self, x):\n            return 2 * x",
        "class Sol:\n    def solve(self, x):\n        return 2 * x\nSolution = Sol",
        "from __future__ import annotations\ndef solve(x: int) -> int:\n    return 2 * x",
        "def solve(x):\n    return 0\nclass Solution:\n    def solve(self, x):\n        return 2 * x",
    ],
)
def test_a_function_is_found_however_the_program_has_it(program: str) -> None:
    assert scored([program], {"tests": [{"function": "solve", "arguments": [4], "output": 8}]}) == [1.0]


@needs("sandbox")
def test_the_right_output_of_a_program_that_fails_is_worth_nothing() -> None:
    row = {"tests": [{"input": "", "output": "7"}]}
    assert scored(["print(7)\n1 / 0", "print(7)\nexit(3)", "print(7)\nexit(0)"], row) == [0.0, 0.0, 1.0]


@needs("sandbox")
def test_a_fraction_counts_all_tests_and_all_or_nothing_does_not() -> None:
    row = {"tests": [{"input": str(number), "output": str(number % 3)} for number in range(4)]}
    assert scored(["print(int(input()))", "print(9)"], row, score="fraction") == [0.75, 0.0]
    assert scored(["print(int(input()))"], row) == [0.0]


@needs("sandbox")
def test_the_longest_tests_are_taken_where_there_are_too_many() -> None:
    row = {
        "tests": [{"input": "1", "output": "no"}, {"input": "22", "output": "22"}, {"input": "333", "output": "333"}]
    }
    assert scored(["print(input())"], row, score="fraction", max_tests=2) == [1.0]
    assert scored(["print(input())"], row, score="fraction") == [pytest.approx(2 / 3)]


@needs("sandbox")
def test_a_program_out_of_cpu_time_gets_nothing_and_says_so() -> None:
    verdicts: dict[str, Any] = {}
    row = {"tests": [{"input": "1 1", "output": "2"}, {"input": "3 4", "output": "7"}]}
    programs = ["while True: pass", STDIN_WRONG, "raise ValueError('odd')", STDIN_RIGHT]
    rewards = scored(programs, row, seconds_per_test=0.5, log_extra=verdicts.__setitem__)
    assert rewards == [0.0, 0.0, 0.0, 1.0]
    cpu_time, wrong, failed, passed = verdicts["verdict"]
    assert (cpu_time, wrong, passed) == ("cpu_time (test 1 of 2)", "wrong answer (test 1 of 2)", "passed")
    assert failed.startswith("failed: ") and "odd" in failed
    assert code(["q"], ["no program"], tests=[row["tests"]], log_extra=verdicts.__setitem__) == [0.0]
    assert verdicts["verdict"] == ["no code"]


@needs("sandbox")
def test_nothing_is_left_from_one_test_to_the_next() -> None:
    row = {"tests": [{"input": "", "output": "new"}] * 2}
    program = "import os\nprint('old' if os.path.exists('/tmp/left') else 'new')\nopen('/tmp/left', 'w').close()"
    assert scored([program], row) == [1.0]


CPP_RIGHT = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"


@needs("sandbox", "g++")
def test_programs_in_cpp_are_compiled_and_judged_by_input_and_output() -> None:
    responses = [
        fenced(CPP_RIGHT, "cpp"),
        fenced(CPP_RIGHT.replace("+ b", "- b"), "c++"),
        fenced("int main() {", "cpp"),
        fenced(STDIN_RIGHT, "python"),
    ]
    columns: dict[str, Any] = {"tests": [STDIN] * 4}
    assert code(["q"] * 4, responses, language="auto", **columns) == [1.0, 0.0, 0.0, 1.0]
    assert code(["q"] * 4, responses, language="cpp", **columns) == [1.0, 0.0, 0.0, 0.0]
    info = {"language": "cpp", "test_cases": [{**case, "type": "stdin_stdout"} for case in STDIN]}
    assert code(["q"] * 4, responses, verification_info=[info] * 4) == [1.0, 0.0, 0.0, 0.0]
    calls = LAYOUTS["function"][0]["tests"]
    assert code(["q"], responses[:1], language="cpp", tests=[calls]) == [0.0]


@pytest.mark.parametrize(
    "option", [{"score": "half"}, {"language": "rust"}, {"seconds_per_test": 0}, {"max_tests": 0}], ids=str
)
def test_an_option_that_cannot_be_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(option))} is .*\n  fix: give "):
        scored(["print(1)"], {"tests": STDIN}, **option)


def test_a_row_with_empty_tests_is_left_out_and_one_without_any_is_refused() -> None:
    assert scored(["print(1)"], {"tests": None}) == [None]
    with pytest.raises(UserError, match="no column with tests"):
        scored(["print(1)"], {"answer": "7"})


@pytest.fixture
def loaded() -> Any:
    made: list[Any] = []

    def load(**settings: Any) -> Any:
        made.extend(load_functions([RewardConfig(function="code", **settings)]))
        return made[-1:]

    yield load
    close_functions(made)


@needs("sandbox")
def test_a_recipes_function_runs_programs_in_its_worker_and_logs_why(groups: Any, loaded: Callable[..., Any]) -> None:
    texts = [fenced(STDIN_RIGHT), fenced(STDIN_WRONG), "nothing"]
    batch = score(groups(texts, tests=[STDIN]), loaded())
    right, wrong, nothing = scores_of(batch)
    assert (right.reward, wrong.reward, nothing.reward) == (1.0, 0.0, 0.0)
    verdicts = [own.extra["code/verdict"] for own in (right, wrong, nothing)]
    assert verdicts == ["passed", "wrong answer (test 1 of 2)", "no code"]


@needs("sandbox")
def test_a_malformed_row_is_named_before_a_run_and_in_it(groups: Any, loaded: Callable[..., Any]) -> None:
    rows = lay_out([{"prompt": "p", "tests": STDIN}, {"prompt": "q", "tests": [{"input": "1"}]}], source="data")
    message = "row data:2: column 'tests' holds no usable tests: there is no 'output'"
    functions = loaded()
    with pytest.raises(UserError, match=f"reward function code, {message}"):
        fit_to_rows(functions, rows)
    fit_to_rows(functions, rows[:1])
    with pytest.raises(UserError, match="column 'tests' holds no usable tests") as caught:
        score(groups(["x"], ["y"], tests=[STDIN, [{"input": "1"}]]), functions)
    assert caught.value.where == "reward function code, row data:2"


def test_a_call_has_time_for_many_tests_unless_the_recipe_says_otherwise(loaded: Callable[..., Any]) -> None:
    assert loaded()[0].time_limit_seconds == 3600
    assert loaded(time_limit_seconds=5)[0].time_limit_seconds == 5
    (from_python,) = load_functions([], code)
    close_functions([from_python])
    assert from_python.time_limit_seconds == 3600 and from_python.settings == ""


@needs("sandbox")
def test_programs_within_thoughts_do_not_count() -> None:
    right, wrong = "```python\ndef f(x): return x + 1\n```", "```python\ndef f(x): return x\n```"
    completions = [
        f"<think>{right}</think>{wrong}",
        f"<think>{wrong}</think>{right}",
        f"<think>{right}",
        f"{right}</think>",
    ]
    verdicts: dict[str, Any] = {}
    rewards = code(["q"] * 4, completions, tests=["assert f(1) == 2"] * 4, log_extra=verdicts.__setitem__)
    assert rewards == [0.0, 1.0, 0.0, 0.0] and verdicts["verdict"][2:] == ["no code"] * 2


@pytest.mark.parametrize(
    ("program", "most_runs", "option"),
    [
        ("import time\ntime.sleep(1000)", 3, "fraction"),
        ("import time\ntime.sleep(0.8)\nprint(1)", 6, "fraction"),  # right, and slower than any machine
        ("import time\ntime.sleep(0.8)\nprint(1)", 6, "all"),
        ("import time\nprint(2, flush=True)\ntime.sleep(0.8)", 6, "fraction"),
        ("import select\nselect.select([], [], [])", 3, "fraction"),
        ("while True: pass", 12, "fraction"),
    ],
)
@needs("sandbox")
def test_a_response_that_sleeps_or_loops_in_each_test_has_a_number_soon(
    program: str, most_runs: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs, run = 0, Sandbox.run

    def counted(*arguments: Any) -> Ran:
        nonlocal num_runs
        num_runs += 1
        return run(*arguments)

    monkeypatch.setattr(Sandbox, "run", counted)
    monkeypatch.setattr(Limits, "wall", 1.0)  # of a test; it is 10 seconds at least
    row = {"tests": [{"input": "", "output": "1"}] * 30}
    (reward,) = scored([program], row, score=option, seconds_per_test=0.2)
    assert reward is not None and 0 <= reward < 0.5 and (option == "fraction" or reward == 0)
    assert 0 < num_runs <= most_runs


FORGED = """
import os, time
def add(numbers):
    for number in range(3, 64):
        try: os.write(number, {line!r} + b"\\n")
        except OSError: pass
    time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["function", "asserts"])
@needs("sandbox")
def test_a_hostile_program_costs_only_its_own_reward(groups: Any, loaded: Callable[..., Any], kind: str) -> None:
    row, (right, wrong, _) = LAYOUTS[kind]
    lines = (
        {"returned": json.dumps({"complex": [10**400, 0]})},
        {"returned": "[" * 3000},
        {"returned": 5},
        {"raised": [], "text": "\ud800"},
        {"raised": "\ud800", "message": "\0", "text": "\ud800"},
    )
    forged = [fenced(FORGED.format(line=json.dumps(line).encode())) for line in lines]
    texts = [fenced(right), forged[0], fenced(right), fenced(wrong), *forged[1:], fenced(right)]
    batch = score(groups(texts, texts, tests=[row["tests"]] * 2), loaded(options={"seconds_per_test": 1}))
    rewards = [own.reward for own in scores_of(batch)]
    assert rewards == [1.0, 0.0, 1.0, 0.0, *[0.0] * len(forged[1:]), 1.0] * 2
    json.dumps([own.extra for own in scores_of(batch)], ensure_ascii=False).encode()
