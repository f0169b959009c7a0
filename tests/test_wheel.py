"""The wheel has all files of the package, and needs no other file of the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.needs import needs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gspo"
BUILD = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"


def files() -> dict[str, Path]:
    """Those of the package, by their name in a wheel."""
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(PACKAGE.parent).as_posix(): path for path in paths}


def test_no_file_of_the_package_is_a_link_for_an_archive_may_have_none() -> None:
    assert [path for path in PACKAGE.rglob("*") if path.is_symlink()] == []


@needs("setuptools")  # a wheel is built with what is installed
def test_the_wheel_has_every_file_of_the_package_and_the_command(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "src" / "gspo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-c", BUILD, tmp_path / "built"], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert packed == files().keys()
        assert [name for name, path in files().items() if archive.read(name) != path.read_bytes()] == []
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert b"gspo = gspo.cli:main" in archive.read(entries)
