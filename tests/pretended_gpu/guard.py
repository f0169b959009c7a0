"""Build guard.cpp and load it, before torch asks for CUDA's hooks."""

import ctypes
import subprocess
from importlib.util import find_spec
from pathlib import Path


def load(directory: Path) -> None:
    """Build the library in a directory, in some 5 s, unless it lies there; and load it into this process."""
    spec, library = find_spec("torch"), directory / "pretended_gpu.so"
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    if not library.exists():
        source, made = Path(__file__).with_name("guard.cpp"), library.with_suffix(".new")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", str(source), "-o", str(made)]
        subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu"], check=True)
        made.rename(library)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
