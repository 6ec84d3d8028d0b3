"""A SLURM cluster of two nodes on this machine: Debian's daemons, unchanged.

Each node is a `slurmd` in separate namespaces, with its host name (image-n1, image-n2), address (in 127/8), /etc/hosts,
processes and a disk. So names and addresses are as on a cluster, no setting of this machine is changed, and all
processes of a node end with it.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.commands import HANG_SECONDS, REPOSITORY, free_port, wait_until

NODES = ("n1", "n2")
NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--fork")
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "unshare", "setpriv")

CONFIGURATION = """
ClusterName=test
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort={port_controller}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job waits this long before it starts again (120 s by default), until old credentials have expired. A node
# that takes longer to check a step's credentials refuses it.
AuthInfo=socket={folder}/munge.socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=3,sched_interval=3
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
KillWait=30
# A node that gets no core for this long (10 s by default) counts as lost, and its job restarts as if requeued.
MessageTimeout=100
BatchStartTimeout=100
# Ended jobs are remembered this long (300 s by default), for slow machines.
MinJobAge=3600
NodeName=n1 NodeAddr={n1} Port={port_n1} CPUs=1 RealMemory=4000
NodeName=n2 NodeAddr={n2} Port={port_n2} CPUs=1 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# --force: as root, below /tmp
MUNGED = """exec munged --foreground --force --key-file={folder}/munge.key --socket={folder}/munge.socket \\
    --pid-file={folder}/munge.pid --log-file={folder}/munge.log --seed-file={folder}/munge.seed"""
# The first process stays bash, which reaps orphans; the daemons would not.
HOST = """hostname {host_name} && mount -t proc proc /proc && mount --bind {folder}/hosts /etc/hosts &&
    mount -t tmpfs -o size=256k tmpfs {folder}/node_disk || exit
{daemons}
wait"""
SLURMD = "slurmd -D -N {name} &"
# Keys and client settings belong to the cluster; ~/.ssh is not read.
SSHD = """mount --bind {folder}/ssh_config /etc/ssh/ssh_config && mount -t tmpfs tmpfs /run && mkdir /run/sshd &&
    $(command -v sshd) -D -e -f /dev/null -h {folder}/ssh_key -o ListenAddress={name} -o StrictModes=no \\
    -o AuthorizedKeysFile={folder}/ssh_key.pub{kernels} &"""
# Variables that keep ranks on the CPU and choose its kernels, and so the last bits. SLURM's jobs inherit them, but ssh
# does not pass them on.
KERNELS = ("DS_ACCELERATOR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "VCORE_DS_CPU_BF16")
SSH_CONFIG = """IdentityFile {folder}/ssh_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def find_missing_requirement(*programs: str) -> str | None:
    """The requirement of a cluster, or of `programs`, that this machine lacks; None if it has all."""
    missing = [name for name in (*NEEDED, *programs) if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install slurm-wlm munge openssh-server pdsh"
    if os.geteuid() != 0:
        return "the SLURM daemons and their namespaces need root"
    needs = "hostname n1 && mount -t proc proc /proc && mount -t tmpfs tmpfs /mnt && mount --bind /mnt /etc"
    tried = subprocess.run([*NAMESPACES, "bash", "-c", needs], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode != 0 else None


class Cluster:
    """A cluster that runs inside a `with` block.

    `folder` holds its configuration, state and logs. `folder / "node_disk"` is a separate disk of 256 KiB on every
    node.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        # Random, like ports and job ids (from which the jobs' ports derive), so that two clusters do not collide.
        network = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
        self.addresses = {name: f"{network}.{10 + i}" for i, name in enumerate(NODES, start=1)}
        self._hosts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        (self.folder / "state").mkdir()
        (self.folder / "node_disk").mkdir()
        ports = {f"port_{name}": free_port() for name in ("controller", *NODES)}
        first_job = random.randrange(1, 40000)
        configuration = CONFIGURATION.format(folder=self.folder, first_job=first_job, **ports, **self.addresses)
        (self.folder / "slurm.conf").write_text(configuration)
        hosts = {"localhost": "127.0.0.1", "controller": "127.0.0.1", **self.addresses}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        if not find_missing_requirement("sshd"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "ssh_key"], check=True)
        try:
            self._start("munged", ["bash", "-c", MUNGED.format(folder=self.folder)])
            wait_until((self.folder / "munge.socket").exists, "munged")
            self._start_host("controller", "slurmctld -D &")
            daemons = SLURMD if find_missing_requirement("sshd") else SLURMD + SSHD
            chosen = " ".join(f"{name}={os.environ[name]}" for name in KERNELS if name in os.environ)
            kernels = f' -o "SetEnv={chosen}"' if chosen else ""
            for name in NODES:
                self._start_host(name, daemons.format(name=name, folder=self.folder, kernels=kernels))
            wait_until(lambda: self.run("sinfo -h -t idle -o %D", check=False) == str(len(NODES)), "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The nodes first. All processes of a host end with the one that is killed here, because of --kill-child.
        for host in reversed(self._hosts):
            host.kill()
            host.wait()

    def _start_host(self, name: str, daemons: str) -> None:
        # The nodes' own names are not SLURM's, and nobody knows them.
        host_name = f"image-{name}" if name in NODES else name
        script = HOST.format(host_name=host_name, daemons=daemons, folder=self.folder)
        self._start(name, [*NAMESPACES, "--kill-child", "bash", "-c", script])

    def _start(self, name: str, words: list[str]) -> None:
        words = ["setpriv", "--pdeathsig", "KILL", *words]  # so that a killed test leaves no cluster behind
        with open(self.folder / f"{name}.log", "wb") as log:
            self._hosts.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def run(
        self, line: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None, *, check: bool = True
    ) -> str:
        """Run a command as on a login node; returns what it prints."""
        done = subprocess.run(
            line.split(),
            env=self.environment | dict(environment or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert not check or done.returncode == 0, f"{line}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def run_on(self, node: str, line: str) -> str:
        """Run `line` on a node by ssh, in the repository with its environment; returns what it prints."""
        bin_folder = Path(sys.executable).parent
        prepare = f"cd {REPOSITORY} && export OMP_NUM_THREADS=1 PATH={bin_folder}:$PATH &&"
        ssh = f"ssh -F {self.folder}/ssh_config {self.addresses[node]}"
        return self.run(f"{ssh} {prepare} {line}")

    def submit(self, script: str, folder: Path, *overrides: str, **environment: str) -> str:
        """Submit a script by sbatch from `folder`, without GPUs, which the nodes lack; returns the job's id."""
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        return self.run(f"sbatch --parsable --gpus-per-node=0 {script} {' '.join(overrides)}", folder, environment)

    def state(self, job: str) -> str:
        """State of a job: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """Value of a field in `scontrol show job`."""
        words = self.run(f"scontrol show job {job}").split()
        return next(word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}="))
