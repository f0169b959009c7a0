"""Jobs of a real Slurm: two nodes, which are this machine twice."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.needs import require

from gspo import cli
from gspo.errors import UserError
from gspo.launch.slurm import slurm_script

TINY = Path(__file__).parents[1] / "tiny.yaml"
SECONDS = 120
CONFIG = """\
ClusterName=gspo
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
StateSaveLocation={root}/state
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdSpoolDir={root}/spool.%n
SlurmdLogFile={root}/slurmd.%n.log
KillWait=5
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory to work in, with a cluster of two nodes; skipped where there is no Slurm, or no right to start it."""
    require("slurm", "root")
    root, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    port = 20_000 + os.getpid() % 10_000
    (root / "state").mkdir()
    text = CONFIG.format(host=host, root=root, port=port, first=port + 1, last=port + 2)
    (root / "slurm.conf").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(root / "slurm.conf"))
        for name, value in (("HF_HUB_OFFLINE", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
            patch.setenv(name, value)
        patch.chdir(root)
        daemons = [
            _munged(root / "munge"),
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", f"n{number}"] for number in (1, 2)),
        ]
        started = []
        try:
            for words in daemons:
                started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                _wait_until((root / "munge/socket").exists)
            _wait_until(lambda: _said("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == ["n1", "n2"])
            yield root
        finally:
            for daemon in reversed(started):
                daemon.terminate()
            for daemon in started:
                daemon.wait(SECONDS)


def _munged(directory: Path) -> list[str]:
    """The command of what Slurm's programs know each other by, with a key of its own."""
    directory.mkdir()
    names = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    (directory / "key").write_bytes(os.urandom(64))
    (directory / "key").chmod(0o600)
    return ["munged", "--foreground", "--force", *(f"--{name}={directory / own}" for name, own in names.items())]


def test_a_job_is_saved_at_its_time_limit_and_goes_on_in_the_queue(
    slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--nodes", "2", "--cpus-per-process", "1", "--save-seconds", "60", "--time", "00:10:00"]
    keys = ["name=job", "steps=400", "checkpoint.every=2", "evaluation.num_queries=0"]
    assert cli.main(["launch", "slurm", str(TINY), *keys, *options]) == 0
    number = capfd.readouterr().out.split()[1].rstrip(";")
    output, run = slurm / f"job-{number}.out", slurm / "runs/job"
    _wait_until((run / "checkpoints/step_000002").exists)
    assert (run / "checkpoints/step_000002/state_1.safetensors").exists()  # the second rank's
    _said("scancel", "--batch", "--signal=USR1", number)  # what Slurm sends before the time limit
    _wait_until(lambda: "Restarts=1" in _said("scontrol", "show", "job", number))
    assert "saved: " in output.read_text()

    def has_resumed() -> bool:
        # Slurm would wait for two minutes. It refuses this while it still ends what ran before, and a job that
        # starts again within a second has no credentials.
        time.sleep(3)
        _said("scontrol", "update", f"jobid={number}", "StartTime=now")
        return "resumed from runs/job/checkpoints/" in output.read_text()

    _wait_until(has_resumed)
    _said("scancel", number)
    _wait_until(lambda: not _said("squeue", "-h", "-j", number))


def test_what_slurm_refuses_is_said(slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "slurm", str(TINY), "--partition", "none"]) == 2
    assert "sbatch refuses the job" in capfd.readouterr().err


def test_without_slurm_the_script_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", "slurm", str(TINY)]) == 2
    assert "--print" in capfd.readouterr().err
    assert cli.main(["launch", "slurm", str(TINY), "name=it's", "--gpus-per-node", "8", "--print"]) == 2  # no name
    assert cli.main(["launch", "slurm", str(TINY), "--gpus-per-node", "8", "--option=--qos=high", "--print"]) == 0
    shown = capfd.readouterr().out
    assert "#SBATCH --gpus-per-node=8\n" in shown and "#SBATCH --qos=high\n" in shown
    assert not list(tmp_path.iterdir())


def test_every_word_of_the_command_reaches_gspo_as_it_was_given(tmp_path: Path) -> None:
    words = ["train", "a recipe.yaml", 'queries.system=it\'s "$HOME" `id`']
    script = slurm_script("run", words).replace(f"{sys.executable} -m gspo", "printf '\\''%s\\n'\\''")
    stand_in = 'srun() { shift; "$@"; }; scontrol() { echo NodeAddr=here; }\n'
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    output = subprocess.check_output(["bash"], input=stand_in + script, env=environment, text=True)
    assert output.splitlines() == words


@pytest.mark.parametrize(
    "value", ["", "x\ntouch here", "x\rtouch", "a b", "a\tb", "a\u2028b", "a\u00a0b", "a#b", "a'b", "\0"]
)
@pytest.mark.parametrize("option", ["--partition", "--account", "--option"])
def test_an_option_that_is_more_than_a_word_never_reaches_the_script(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"--qos={value}" if option == "--option" else value
    assert cli.main(["launch", "slurm", str(TINY), "--print", f"{option}={text}"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "sbatch would not read this as one option" in said.err and "fix: " in said.err


def test_whatever_a_recipe_or_a_container_is_named_the_script_has_no_line_of_it(tmp_path: Path) -> None:
    hostile = "a\ntouch PWNED; $(touch PWNED) `touch PWNED` '\""
    script = slurm_script("name", ["train", hostile, f"output_dir={hostile}"], container=hostile)
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n"}
    subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, check=False)
    assert not list(Path.cwd().glob("PWNED")) and not (tmp_path / "PWNED").exists()


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def _wait_until(is_so: object) -> None:
    began = time.monotonic()
    assert callable(is_so)
    while not is_so():
        assert time.monotonic() - began < SECONDS
        time.sleep(0.2)


@pytest.mark.parametrize("time", ["banana", "0:03:00", "5", "4:59", "0-0:05", ""])
def test_a_time_that_slurm_would_not_know_or_that_leaves_none_to_train_is_refused(time: str) -> None:
    with pytest.raises(UserError, match="--time"):
        slurm_script("job", [], time=time)


@pytest.mark.parametrize("time", ["6", "5:01", "0:05:01", "1-0", "0-0:06", "0-0:5:1", "UNLIMITED"])
def test_a_time_is_any_of_slurms(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in slurm_script("job", [], time=time)


@pytest.mark.parametrize("options", [["--nodes", "0"], ["--processes-per-node", "-3"], ["--save-seconds", "1.5"]])
def test_numbers_that_no_job_can_have_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "slurm", str(TINY), "--print", *options]) == 2
    assert f"{options[0]}: " in capsys.readouterr().err
