"""Importing a function's file or module ends in that function or in an error that names it, whatever its code does."""

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
