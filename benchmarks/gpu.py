"""All that is worth measuring once a GPU is here: parts that are run in calls of at most nine minutes.

    python -m benchmarks.gpu                                       # again and again, until nothing is left
    python -m benchmarks.gpu --trl-python .venv-trl/bin/python     # and whole steps against TRL
    python -m benchmarks.gpu --quick                               # small parts on whatever there is: do they work?

What a part prints is in DIRECTORY/part.txt as soon as it prints it, and DIRECTORY/parts.jsonl has a line for each part
that has ended. A later call leaves those out, begins one that was short of time again, and goes on with the training.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

MINUTES = 9.0  # of a call
_SAVING_SECONDS = 40.0  # of these, for a run to save itself
_LEAST_SECONDS = 20.0  # with less left, no part is begun
PYTHON = [sys.executable, "-m"]
TRAINING = "gsm8k"  # for the minutes that are left: it goes on where it was
PARTS: dict[str, list[str]] = {
    "tests": [*PYTHON, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_pretended_gpu.py"],
    "speed": [*PYTHON, "benchmarks.gpu_speed"],
    "decoding": [*PYTHON, "benchmarks.gpu_decoding"],
    "levers": [*PYTHON, "benchmarks.levers"],
    "memory": [*PYTHON, "benchmarks.memory", "--measure", "--device", "cuda"],
    "trl": [*PYTHON, "benchmarks.peer.compare", "--workloads", "half a billion", "--trl-python"],
    TRAINING: [*PYTHON, "gspo", "launch", "local", "recipes/gsm8k.yaml", "--max-failures", "0"],
}
QUICK: dict[str, list[str]] = {
    "speed": [*PARTS["speed"], "--quick", "--repeats", "1"],
    "decoding": [*PARTS["decoding"], "--quick"],
    TRAINING: [*PYTHON, "gspo", "launch", "local", "recipes/arithmetic.yaml", "--max-failures", "0", "steps=2"],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are left, as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call")
    parser.add_argument("--trl-python", help="an interpreter that has TRL")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    parts = dict(QUICK if options.quick else PARTS)
    if options.trl_python and "trl" in parts:
        parts["trl"] = [*parts["trl"], options.trl_python]
    else:
        parts.pop("trl", None)
    parts[TRAINING] = [*parts[TRAINING], f"output_dir={options.directory / 'run'}"]
    options.directory.mkdir(parents=True, exist_ok=True)
    run_parts(parts, options.directory, 60 * options.minutes)


def run_parts(parts: Mapping[str, Sequence[str]], directory: Path, seconds: float) -> None:
    """Run those that have not ended in an earlier call, one after another, and write how each ends."""
    record, ends_at = directory / "parts.jsonl", time.monotonic() + seconds
    lines = record.read_text().splitlines() if record.exists() else []
    ended = {line["part"] for line in map(json.loads, lines) if line["how"] != "short of time"}
    for number, name in enumerate(name for name in parts if name not in ended):
        if (left := ends_at - time.monotonic()) < _LEAST_SECONDS:
            print(f"no time is left for {name}: call this again")
            return
        began = time.monotonic()
        code = _run(parts[name], directory / f"{name}.txt", left)
        how = "failed" if code else "done"
        if code is None:  # one that has had a whole call would never end, but for the training
            how = "cut off" if number == 0 and name != TRAINING else "short of time"
        line = {"part": name, "how": how, "seconds": round(time.monotonic() - began), "ended": _now()}
        with record.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        print(f"{name}: {how} after {line['seconds']} s; see {directory / name}.txt", flush=True)


def _run(words: Sequence[str], output: Path, seconds: float) -> int | None:
    """The exit code of a program that writes to the end of a file; None where it had to be ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "GSPO_TESTS_ON_GPU": "1"}
    with output.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait(max(seconds - _SAVING_SECONDS, seconds / 2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(min(_SAVING_SECONDS, seconds / 2))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
