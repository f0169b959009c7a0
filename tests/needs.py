"""The parts of a machine that only some tests need: those tests are skipped where one is missing, and say why."""

import os
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from platform import libc_ver

import pytest

PROGRAMS = {
    "chromium": (("chromium", "chromedriver"), "Debian's packages chromium and chromium-driver"),
    "g++": (("g++",), "Debian's package g++"),
    "slurm": (("slurmctld", "slurmd", "sbatch", "munged"), "Debian's packages slurm-wlm and munge"),
}

VLLM = Path(__file__).parents[1] / ".venv-vllm"
MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m"


def needs(*parts: str) -> pytest.MarkDecorator:
    """Mark a test, a class or (as `pytestmark`) a file that is skipped where a part is missing: `@needs("sandbox")`.

    A part is "sandbox", "vllm" (a server), "smollm2" (a real model), "root", "glibc",
    "waits", a name of PROGRAMS or a module.
    """
    return pytest.mark.needs(*parts)


def require(*parts: str) -> None:
    """Skip the test that asks for a part which is missing, or all tests of the fixture or the file that does."""
    for part in parts:
        if reason := missing(part):
            pytest.skip(reason, allow_module_level=True)


@cache
def missing(part: str) -> str:
    """Why no test can have the part; empty where it is there."""
    if part == "sandbox":
        return _why_no_sandbox()
    if part == "glibc":
        return "" if libc_ver()[0] == part else "the C library is not glibc"
    if part == "vllm":  # what `make vllm` has not finished is none
        has_one = "GSPO_VLLM_PYTHON" in os.environ or (VLLM / ".installed").exists()
        return missing("g++") if has_one else "no vLLM: `make vllm`"  # which compiles when it starts
    if part == "smollm2":
        return "" if (MODEL / "config.json").exists() else "no real language model: `make smollm2`"
    if part == "waits":  # which the pretended GPU counts, and a real one does not
        return "no waits are counted on a real GPU" if os.environ.get("GSPO_TESTS_ON_GPU") == "1" else ""
    if part == "root":
        return "" if os.geteuid() == 0 else "only root can do this"
    if part in PROGRAMS:
        programs, packages = PROGRAMS[part]
        absent = [name for name in programs if shutil.which(name) is None]
        return f"{' and '.join(absent)} not found: {packages}" if absent else ""
    return "" if find_spec(part) else f"the module {part} is not installed"


def _why_no_sandbox() -> str:
    from gspo.errors import UserError
    from gspo.sandbox.sandbox import check_available

    try:
        check_available()
    except UserError as error:
        return " ".join(str(error).split())
    return ""
