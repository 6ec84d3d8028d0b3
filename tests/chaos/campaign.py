"""`make chaos`: runs of a tiny model on two ranks, or on two tensor-parallel pairs, killed at random again and again,
against an undisturbed run.

The real command is killed at any moment from its first seconds on, and started again. The exit code is 1 where a run
does not end, does not resume from its newest intact checkpoint, or ends with other results than the undisturbed one.
"""

import argparse
import hashlib
import json
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from tests.chaos.tiny_run import TinyRun, make_setup
from tests.helpers.jobs import Job
from tests.helpers.setups import sums
from vcore_ds.common.errors import EXIT_STOPPED

NUM_STEPS = 60
NUM_STEPS_BETWEEN_KILLS = 10
"""At most, at the pace of the undisturbed run, so that most runs are killed several times."""
SHARE_DURING_START_UP = 0.2

KILLED_RANK, KILLED_LAUNCHER, TERMINATED = "SIGKILL to a rank", "SIGKILL to the launcher", "SIGTERM to the launcher"
HUNG_RANK, DAMAGED = "SIGSTOP to a rank", "SIGKILL to a rank, then damage to the newest checkpoint"
EXIT_CODES = {
    KILLED_RANK: {1},
    KILLED_LAUNCHER: {-signal.SIGKILL},
    TERMINATED: {EXIT_STOPPED, -signal.SIGTERM},  # the second: before Python listened to signals
    HUNG_RANK: {1},
    DAMAGED: {1},
}


@dataclass
class Campaign:
    """Measurements of the undisturbed run, and the outcome of the others."""

    undisturbed: TinyRun
    seconds_start_up: float
    """From the start of the ranks to the end of their first step."""
    seconds_step: float
    random: random.Random
    num_runs: int = 0
    num_resumes: int = 0
    num_steps_lost: int = 0
    """Steps that were written to metrics.jsonl and taken again."""
    differences: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def new_run(self) -> TinyRun:
        self.num_runs += 1
        folder = self.undisturbed.folder.with_name(f"run{self.num_runs}")
        return replace(self.undisturbed, folder=folder, logs=[])

    def attempt(self, run: TinyRun, kind: str | None) -> str | None:
        """Start the run and kill it. Returns a description, or None where the run finished before.

        Args:
            kind: a key of EXIT_CODES; None to let it finish.
        """
        expected = find_newest_intact_step(run)
        with run.start() as job:
            hit = None if kind is None else self._hit(run, job, kind)
            try:
                code = job.wait(180)  # until all of its processes have ended
            except AssertionError as error:
                self.problems.append(f"{run.logs[-1]}: {hit or 'not hit'}: {str(error).splitlines()[0]}")
                return hit
        if (run.folder / "adapter").is_dir():
            hit = None  # too late to matter
        elif kind is None or hit is None or code not in EXIT_CODES[kind]:
            self.problems.append(f"{run.logs[-1]}: {hit or 'not hit'}: exit code {code}")
        resumed = re.search(r"Resumed after step (\d+)", job.output)
        self.num_resumes += resumed is not None
        if resumed is not None and int(resumed[1]) != expected:
            self.problems.append(f"{run.logs[-1]}: resumed after step {resumed[1]}, expected {expected}")
        if resumed is None and expected is not None and f"/{NUM_STEPS} " in job.output:
            self.problems.append(f"{run.logs[-1]}: started over, expected to resume after step {expected}")
        return hit + self._damage(run) if hit is not None and kind == DAMAGED else hit

    def finish(self, run: TinyRun) -> None:
        """Compare a finished run with the undisturbed one."""
        self.num_steps_lost += len(run.steps_lost())
        self.differences += [f"{run.folder}: {difference}" for difference in run.differences(self.undisturbed)]

    def _hit(self, run: TinyRun, job: Job, kind: str) -> str | None:
        """Wait for a random moment and send the signal. Returns a description, or None where the run ends before."""
        rank = self.random.randrange(run.num_ranks) if kind in (KILLED_RANK, HUNG_RANK, DAMAGED) else None
        # While models are loaded, silence for minutes is normal, and no rank would end one that hangs.
        if kind != HUNG_RANK and self.random.random() < SHARE_DURING_START_UP:
            seconds = self.random.uniform(0, self.seconds_start_up)
            began = rank is None or wait_until(lambda: find_process(job, rank) is not None, job)
        else:
            seconds = self.random.uniform(0, NUM_STEPS_BETWEEN_KILLS * self.seconds_step)
            began = wait_until(lambda: re.search(rf"step \d+/{NUM_STEPS} ", job.output), job)
        ends_at = time.monotonic() + seconds
        if not began or not wait_until(lambda: time.monotonic() > ends_at, job):
            return None
        number = {TERMINATED: signal.SIGTERM, HUNG_RANK: signal.SIGSTOP}.get(kind, signal.SIGKILL)
        # Look up all processes, so that the job can wait for them when its launcher is dead.
        processes = [find_process(job, each) for each in range(run.num_ranks)]
        process = job.launcher if rank is None else processes[rank]
        try:
            assert process is not None
            process.send_signal(number)
        except (AssertionError, psutil.NoSuchProcess):
            return None
        if kind == HUNG_RANK and (run.folder / "adapter").is_dir():
            # The result is written, and ranks that exit no longer watch each other.
            process.resume()
            return None
        return kind if rank is None else kind.replace("a rank", f"rank {rank}")

    def _damage(self, run: TinyRun) -> str:
        """Damage a file of the newest checkpoint, unless it is the last intact one. Returns a description."""
        newest = find_newest_intact_step(run)
        if newest is None or find_newest_intact_step(run, below=newest) is None:
            return " (no checkpoint damaged: it is the last intact one)"
        path = self.random.choice(sorted(path for path in run.checkpoint(newest).rglob("*") if path.is_file()))
        what = self.random.choice(["bit flipped", "truncated", "deleted"])
        if what == "deleted":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            position = self.random.randrange(len(content) - 1)  # the last byte is the line feed of COMPLETE
            if what == "bit flipped":
                content[position] ^= 1 << self.random.randrange(8)
            else:
                del content[position:]
            path.write_bytes(content)
        assert find_newest_intact_step(run) != newest
        return f" ({path.relative_to(run.folder / 'checkpoints')} {what})"


def find_process(job: Job, rank: int) -> psutil.Process | None:
    try:
        return job.rank(rank)
    except AssertionError:
        return None


def wait_until(condition: Callable[[], object], job: Job) -> bool:
    """Wait until the condition holds; returns whether it did before the job ended or three minutes had passed."""
    deadline = time.monotonic() + 180
    while not condition():
        if job.launcher.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def find_newest_intact_step(run: TinyRun, below: int = NUM_STEPS + 1) -> int | None:
    """Find the newest intact checkpoint, without the package's reader of manifests; None where none is intact."""
    return max((step for step in run.marked_steps() if step < below and is_intact(run.checkpoint(step))), default=None)


def is_intact(checkpoint: Path) -> bool:
    try:
        manifest = (checkpoint / "manifest.json").read_bytes()
        if (checkpoint / "COMPLETE").read_bytes().strip() != hashlib.sha256(manifest).hexdigest().encode():
            return False
        files = json.loads(manifest)["files"]
        return all(
            hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == record["sha256"]
            for name, record in files.items()
        )
    except OSError:
        return False


def start_campaign(folder: Path, generator: random.Random, sequence_parallel: str, tensor: int) -> Campaign:
    """Train the undisturbed run and measure its pace."""
    setup = make_setup(folder, sums(range(32)))
    parallel_sizes = [f"{section}.sequence_parallel={sequence_parallel}" for section in ("batch", "probe")]
    changes = ("engine.lost_rank_seconds=5", *parallel_sizes)
    run = TinyRun(folder / "undisturbed", setup, NUM_STEPS, changes, tensor)
    with run.start() as job:
        wait_until(lambda: find_process(job, 0) is not None, job)
        ranks_began = time.monotonic()
        wait_until(lambda: f"step 1/{NUM_STEPS} " in job.output, job)
        first_step_done = time.monotonic()
        assert job.wait(300) == 0, job.output
    seconds_step = (time.monotonic() - first_step_done) / NUM_STEPS
    return Campaign(run, first_step_done - ranks_began, seconds_step, generator)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument(
        "--sequence-parallel", choices=("auto", "1", "2"), default="auto", help="sequence-parallel size"
    )
    parser.add_argument(
        "--tensor", type=int, choices=(1, 2), default=1, help="tensor-parallel size; with 2, a run has 4 ranks"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vcore_ds_chaos_"))
    print(f"{arguments.kills} kills, SEED={arguments.seed}, in {folder}", flush=True)
    generator = random.Random(arguments.seed)
    # Every kind occurs equally often.
    kinds = [kind for _ in range(0, arguments.kills, len(EXIT_CODES)) for kind in EXIT_CODES][: arguments.kills]
    generator.shuffle(kinds)

    started = time.monotonic()
    campaign = start_campaign(folder, generator, arguments.sequence_parallel, arguments.tensor)
    print(
        f"undisturbed: a start of {campaign.seconds_start_up:.0f} s, {NUM_STEPS} steps of {campaign.seconds_step:.2f} s"
    )
    num_kills, run = 0, None
    while (kinds or run is not None) and not campaign.problems:
        run = run or campaign.new_run()
        hit = campaign.attempt(run, kinds[-1] if kinds else None)
        where = f"minute {(time.monotonic() - started) / 60:.1f}: {run.folder.name}"
        if hit is None:
            campaign.finish(run)
            print(f"{where} has finished: {len(campaign.differences)} differences so far", flush=True)
            run = None
        else:
            kinds.pop()
            num_kills += 1
            num_done, num_saved = max(run.steps_taken(), default=0), find_newest_intact_step(run) or 0
            progress = f"{num_done} of {NUM_STEPS} steps done, {num_saved} saved"
            print(f"{where}: kill {num_kills}/{arguments.kills}: {hit}: {progress}", flush=True)

    print("\n".join(campaign.problems + campaign.differences))
    print(
        f"{num_kills} kills, {campaign.num_resumes} resumes, {campaign.num_runs} runs of {NUM_STEPS} steps, "
        f"{campaign.num_steps_lost} steps lost and taken again, {len(campaign.differences)} differences, "
        f"{len(campaign.problems)} other problems, {(time.monotonic() - started) / 60:.1f} minutes"
    )
    if campaign.problems or campaign.differences:
        print(f"SEED={arguments.seed}; runs and logs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
