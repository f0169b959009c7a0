"""A run as a job of Slurm: a script that a person can read, which goes to the queue again before its time is over."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.errors import UserError

_WHERE = "gspo launch slurm"
_SCRIPT = """\
#!/bin/bash
# Written by `gspo launch slurm`, which has the same options with --print to show it.
{directives}
cd {directory}

# The ranks meet on the first node. They talk without encryption: the network between the nodes has to be your own.
node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$node" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"

# Before the time limit Slurm sends SIGUSR1 to this script. The ranks get SIGTERM, which saves the run and ends it.
stop() {{ stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"; }}
trap stop USR1

srun --kill-on-bad-exit=1{container} bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={tasks}
  exec {command}' &
wait $!
code=$?
if [ "$stopped" ]; then  # that has ended the wait; the ranks are still saving
  wait $!
  scontrol requeue "$SLURM_JOB_ID"  # the job starts again, and the run goes on from its checkpoint
fi
exit $code
"""


def slurm_script(
    name: str,
    arguments: Sequence[str],
    *,
    processes_per_node: int = 1,
    cpus_per_process: int | None = None,
    time: str | None = None,
    save_seconds: int = 300,
    container: str | None = None,
    option: Sequence[str] = (),
    **asked: str | int,
) -> str:
    """The script that runs gspo with these arguments as the job's ranks; `name` is the run's.

    `asked` are nodes (1), gpus_per_node, partition and account. UserError where the time is none
    of Slurm's, or is over before the run could save itself, and for an option that is more than a word.
    """
    named = {"job-name": name, "output": f"{name}-%j.out", "open-mode": "append", "nodes": 1, **asked}
    named |= {"ntasks-per-node": processes_per_node, "signal": f"B:USR1@{save_seconds}"}
    if time is not None:
        _check_time(time, save_seconds)
        named["time"] = time
    if cpus_per_process is not None:
        named["cpus-per-task"] = cpus_per_process
    options = [f"--{name.replace('_', '-')}={value}" for name, value in named.items()]
    options += ["--requeue", *option]
    for word in options:  # a line of the script, which sbatch cuts up
        if not word.isprintable() or not re.fullmatch(r"-[^ '\"\\#=]+(=[^ '\"\\#]+)?", word):
            fix = "give one word, --name or --name=value, without blanks, quotes, # and \\"
            raise UserError(f"sbatch would not read this as one option: {word!r}", where=_WHERE, fix=fix)
    here, python, inside = str(Path.cwd()), shlex.quote(sys.executable), ""
    if container is not None:
        words = {"image": container, "mounts": f"{here}:{here}", "workdir": here}
        inside = "".join(f" --container-{name}={shlex.quote(word)}" for name, word in words.items())
        python = "python"
    command = f"{python} -m gspo {shlex.join(arguments)}"
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {word}" for word in options),
        directory=shlex.quote(here),
        container=inside,
        tasks=processes_per_node,
        command=command.replace("'", "'\\''"),
    )


def _check_time(time: str, save_seconds: int) -> None:
    """Raise UserError for a time that is none of Slurm's, or is over before the run could save itself."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return
    if not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", time):
        raise UserError(f"{time!r} is no time of Slurm's", where="--time", fix="write it as 24:00:00 or 2-12:00:00")
    units = [3600, 60, 1] if time.count(":") == 2 else [60, 1]  # of what has no days, minutes come first
    units = [86_400, 3600, 60, 1] if "-" in time else units
    seconds = sum(int(part) * unit for part, unit in zip(re.split("[-:]", time), units, strict=False))
    if seconds <= save_seconds:
        what = f"a job of {time} is told {save_seconds} s before its end to save the run: before it has begun"
        raise UserError(what, where="--time", fix="give more time, or fewer --save-seconds")


def submit(script: str) -> str:
    """Put the script into Slurm's queue; the job's number. UserError where Slurm does not take it."""
    if shutil.which("sbatch") is None:
        fix = "run this where Slurm's commands are, or have the script shown with --print"
        raise UserError("there is no sbatch on this machine", where=_WHERE, fix=fix)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        fix = "correct the options; --print shows the script"
        raise UserError(f"sbatch refuses the job: {done.stderr.strip()}", where=_WHERE, fix=fix)
    return done.stdout.strip().partition(";")[0]
