"""A run as a job of Slurm: a script that a person can read, which goes to the queue again before its time is over."""

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo.errors import UserError

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


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a job asks Slurm for.

    Example: SlurmJob(nodes=2, processes_per_node=8, gpus_per_node=8, time="24:00:00") has 16 ranks.
    """

    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_process: int | None = None
    time: str | None = None  # as Slurm writes it; None: the partition's limit
    save_seconds: int = 300  # that a run has to save itself before the time limit
    partition: str | None = None
    account: str | None = None
    container: str | None = None  # an image, for Slurm's pyxis
    options: Sequence[str] = ()  # further ones of sbatch, such as --qos=high


def slurm_script(job: SlurmJob, name: str, arguments: Sequence[str]) -> str:
    """The script that runs gspo with these arguments as the job's ranks; `name` is the run's.

    UserError where the time is none of Slurm's, or is over before the run could save itself, and for an option that
    is more than a word.
    """
    if job.time is not None and _seconds(job.time) <= job.save_seconds:
        what = f"a job of {job.time} is told {job.save_seconds} s before its end to save the run: before it has begun"
        raise UserError(what, where="--time", fix="give more time, or fewer --save-seconds")
    named = {
        "job-name": name,
        "output": f"{name}-%j.out",
        "open-mode": "append",
        "nodes": job.nodes,
        "ntasks-per-node": job.processes_per_node,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_process,
        "time": job.time,
        "signal": f"B:USR1@{job.save_seconds}",
        "partition": job.partition,
        "account": job.account,
    }
    options = [f"--{option}={value}" for option, value in named.items() if value is not None]
    for option in (options := [*options, "--requeue", *job.options]):  # a line of the script, which sbatch cuts up
        if not option.isprintable() or not re.fullmatch(r"-[^ '\"\\#=]+(=[^ '\"\\#]+)?", option):
            fix = "give one word, --name or --name=value, without blanks, quotes, # and \\"
            raise UserError(f"sbatch would not read this as one option: {option!r}", where="gspo launch slurm", fix=fix)
    directives = "\n".join(f"#SBATCH {option}" for option in options)
    container, python = "", shlex.quote(sys.executable)
    if job.container is not None:
        mounts = f"{Path.cwd()}:{Path.cwd()}"
        container = f" --container-image={shlex.quote(job.container)} --container-mounts={shlex.quote(mounts)}"
        container, python = f"{container} --container-workdir={shlex.quote(str(Path.cwd()))}", "python"
    command = f"{python} -m gspo {shlex.join(arguments)}"
    return _SCRIPT.format(
        directives=directives,
        directory=shlex.quote(str(Path.cwd())),
        container=container,
        tasks=job.processes_per_node,
        command=command.replace("'", "'\\''"),
    )


def _seconds(time: str) -> float:
    """Of minutes, minutes:seconds, hours:minutes:seconds, days-hours, …, as `sbatch --time` has it."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, re.ASCII)
    if match is None:
        raise UserError(f"{time!r} is no time of Slurm's", where="--time", fix="write it as 24:00:00 or 2-12:00:00")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is None and third is None:  # minutes come first
        return 60.0 * (first or 0) + (second or 0)
    return 86_400.0 * (days or 0) + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)


def submit(script: str) -> str:
    """Put the script into Slurm's queue; the job's number. UserError where Slurm does not take it."""
    if shutil.which("sbatch") is None:
        fix = "run this where Slurm's commands are, or have the script shown with --print"
        raise UserError("there is no sbatch on this machine", where="gspo launch slurm", fix=fix)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        fix = "correct the options; --print shows the script"
        raise UserError(f"sbatch refuses the job: {done.stderr.strip()}", where="gspo launch slurm", fix=fix)
    return done.stdout.strip().partition(";")[0]
