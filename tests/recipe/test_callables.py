"""Importing a function's file or module ends in that function or in an error that names it, whatever its code does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.errors import UserError
from gspo.recipe.callables import load_callable

ENDS = {
    "sys.exit": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "raise SystemExit": ("raise SystemExit\n", "SystemExit"),
    "generator": ("raise GeneratorExit\n", "GeneratorExit"),
    "its own": ("class Odd(BaseException): pass\nraise Odd('odd')\n", "Odd: odd"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["mine_{}.py:f", "mine_{}:f"])
def test_code_that_ends_the_program_at_its_import_is_an_error_that_names_it(
    end: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    source, said = ENDS[end]
    unique = f"{end.replace(' ', '_').replace('.', '_')}_{'py' if '.py' in name else 'module'}"
    Path(f"mine_{unique}.py").write_text(source, encoding="utf-8")
    with pytest.raises(UserError, match=f"importing .*mine_{unique}.* raises {said}"):
        load_callable(name.format(unique), where="reward.function")


def test_the_way_out_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(): ...\nraise SystemExit(0)\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.py, line 2 raises SystemExit: 0(.|\n)*if __name__ == '__main__'"):
        load_callable(f"{tmp_path}/mine.py:f", where="reward.function")


def test_ctrl_c_during_an_import_stays_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        load_callable(f"{tmp_path}/mine.py:f", where="reward.function")


@pytest.mark.parametrize("source", ["import os\nos._exit(0)\n", "from os import _exit\n_exit(0)\n"])
def test_an_exit_that_no_python_code_hears_of_is_an_error_too(source: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    code = f"from gspo.recipe.callables import load_callable\nload_callable({f'{tmp_path}/mine.py:f'!r}, where='x')\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "raises SystemExit: 0" in ended.stderr


def test_a_process_that_imported_code_forks_may_end_itself_and_afterwards_so_may_any(tmp_path: Path) -> None:
    source = "import os\nif (child := os.fork()) == 0:\n    os._exit(3)\nSTATUS = os.waitpid(child, 0)[1]\n"
    (tmp_path / "forks.py").write_text(source + "def f(): return STATUS >> 8\n", encoding="utf-8")
    leave = os._exit
    assert load_callable(f"{tmp_path}/forks.py:f", where="x")() == 3
    assert os._exit is leave
