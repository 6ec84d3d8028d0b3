"""Two tensor-parallel pairs of ranks: after a killed rank and a stop request the run ends, bit for bit, like an
undisturbed one."""

import re
import signal
import socket
from dataclasses import replace

import pytest

from tests.chaos.inject import Fault
from tests.chaos.tiny_run import RECIPE, TinyRun, make_setup
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums
from tests.helpers.soak import soak_only
from vcore_ds.common.errors import EXIT_STOPPED
from vcore_ds.config.load import load_recipe
from vcore_ds.training.run import train

pytestmark = [pytest.mark.e2e, soak_only]

NUM_STEPS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    folder = tmp_path_factory.mktemp("tensor_groups")
    return TinyRun(folder / "run", make_setup(folder, sums(range(32))), NUM_STEPS, tensor=2)


def test_a_rank_killed_in_the_backward_is_named(run: TinyRun):
    """The rank of its tensor-parallel group waits for its part of the gradients, the others for its shards."""
    with run.fork(Fault("backward", rank=3, step=3, phase="main", call=9)) as job:
        assert job.wait() == 1, job.output
    struck = re.search(r"FAULT: SIGKILL: backward of rank 3 \(pid (\d+)\) at: step 3, main\n", job.output)
    assert struck, job.output
    named = re.escape(f"rank 3 (host {socket.gethostname()}, pid {struck[1]}), last seen at: ")
    assert re.search(rf"rank [012]: {named}[\w, ]+: its process is dead", job.output), job.output
    assert run.marked_steps() == [2] and run.steps_taken() == [1, 2]


def test_a_stop_request_to_one_rank_stops_and_saves_the_run(run: TinyRun):
    with run.fork() as job:
        job.wait_for(f"step 3/{NUM_STEPS} ")
        job.rank(1).send_signal(signal.SIGUSR1)
        assert job.wait() == EXIT_STOPPED, job.output
    assert f"Resumed after step 2 from {run.checkpoint(2)}" in job.output, job.output
    taken = run.steps_taken()
    assert taken == list(range(1, len(taken) + 1)) and 3 <= len(taken) < NUM_STEPS
    assert run.marked_steps()[-1] == len(taken)
    assert job.output.count(f"stopped by SIGUSR1 after step {len(taken)} of {NUM_STEPS} and saved in ") == 1, job.output


def train_each(*runs: TinyRun) -> None:
    for run in runs:
        train(load_recipe(RECIPE, run.overrides))


def test_the_finished_run_equals_an_undisturbed_one(run: TinyRun):
    undisturbed = replace(run, folder=run.folder.with_name("undisturbed"))
    run_ranks(train_each, run.num_ranks, run, undisturbed)
    assert run.steps_lost() == []  # each attempt resumed after the last step taken
    assert run.differences(undisturbed) == []
