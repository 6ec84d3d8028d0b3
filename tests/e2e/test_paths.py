"""Folders that cannot be written, files that cannot be read, and disks that fill: one message, exit code 2, and nothing
half-written that does not end in `.unfinished`.

All commands run in this process. Tests that need root (a mounted disk, another user) are skipped with a reason
elsewhere.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.commands import REPOSITORY
from tests.helpers.setups import TinySetup, make_tokenizer, sums, write_conversations, write_model
from tests.helpers.small_disk import mount_small_disk
from tests.unit.test_export import make_trained_masters, write_run
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import writing
from vcore_ds.data.store import TokenStore

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

RECIPE = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_32b_math_full.yaml"
NOBODY = 65534


@pytest.fixture(scope="module")
def run(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return write_run(folder, setup.untied, make_trained_masters(setup.untied, lora=False), lora=False, precision="fp32")


KEYS = {
    "train": "run.output_dir",
    "check": "run.output_dir",
    "train, cache": "data.cache_dir",
    "prepare": "--output",
    "export": "--output",
    "reference": "--output",
    "fidelity": "--output",
}


@dataclass(frozen=True)
class Commands:
    """Command lines that write into a folder of the user; other output goes into `scratch`."""

    setup: TinySetup
    run: Path
    scratch: Path

    def line(self, name: str, output: Path) -> list[str]:
        command, key = name.partition(",")[0], KEYS[name]
        recipe = [str(RECIPE), *self.setup.overrides(self.scratch / "output")]
        conversion = [str(self.setup.train), "--processes", "1", "--tokenizer", str(self.setup.untied)]
        arguments = {
            "prepare": conversion,
            "export": [str(self.run)],
            "fidelity": [*recipe, "--ranks", "0", "--epsilons", "1e-2"],
        }
        words = [key, str(output)] if key == "--output" else [f"{key}={output}"]
        return [command, *arguments.get(name, recipe), *words]


@pytest.fixture
def commands(setup: TinySetup, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.chdir(REPOSITORY)
    return Commands(setup, run, tmp_path / "scratch")


Refusal = Callable[[list[str]], str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """A function that runs a command which must end with exit code 2, and returns its only message."""

    def refusal(line: list[str]) -> str:
        capsys.readouterr()
        assert main(line) == UserError.EXIT_CODE == 2
        error = capsys.readouterr().err
        assert error.count("vcore-ds: ") == 1 and "Traceback" not in error and "Exception ignored" not in error, error
        return error[error.index("vcore-ds: ") + len("vcore-ds: ") :]

    return refusal


# Folders that cannot be made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mount_small_disk(folder, 2**20) as mounted:
        if not mounted:
            pytest.skip("NOT TESTED: a disk that is full or read-only, as no tmpfs can be mounted here (not root?)")
        yield folder


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


@contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Make a folder read-only inside the block; for root, who may write anywhere else, immutable."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode != 0:
        pytest.skip("NOT TESTED: a folder without permission, as root, on a file system without `chattr +i`")
    yield
    subprocess.run(["chattr", "-i", str(folder)], check=True)


def make_obstacles(folder: Path) -> dict[str, tuple[Path, str]]:
    """Output that cannot be made, and the cause as a pattern."""
    (folder / "notes").write_text("mine")
    (folder / "link").symlink_to(folder / "gone")
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    return {
        "in /proc": (Path("/proc/vcore_ds"), "No such file or directory"),
        "a file": (folder / "notes" / "output", "(Not a directory|File exists)"),
        "a dangling link": (folder / "link", "File exists"),
        "behind a dangling link": (folder / "link" / "output", "File exists"),
        "a circular link": (folder / "one" / "output", "Too many levels of symbolic links"),
        "a long name": (folder / ("x" * 300), "File name too long"),
        # The system limits bytes, a recipe characters.
        "a long path": (folder.joinpath(*["é" * 100] * 25, "output"), "File name too long"),
    }


@pytest.mark.parametrize("name", KEYS)
def test_a_folder_that_cannot_be_created_is_refused(commands: Commands, refusal: Refusal, tmp_path: Path, name: str):
    """With all obstacles by one command: one function describes them for all."""
    (tmp_path / "place").mkdir()
    obstacles = make_obstacles(tmp_path / "place")
    # The file of `reference` is written to a link's target.
    several = list(obstacles) if name == "check" else ["a file", "a dangling link"][: 1 + (name != "reference")]
    for obstacle in several:
        check_refused(commands, refusal, tmp_path, name, *obstacles[obstacle])
    with without_permission(tmp_path / "place"):
        cause = "Operation not permitted" if os.geteuid() == 0 else "Permission denied"
        check_refused(commands, refusal, tmp_path, name, tmp_path / "place" / "output", cause)


@pytest.mark.parametrize("name", KEYS)
def test_a_read_only_file_system_is_refused(
    commands: Commands, refusal: Refusal, tmp_path: Path, disk: Path, name: str
):
    remount(disk, "ro")
    check_refused(commands, refusal, tmp_path, name, disk / "output", "Read-only file system")


def check_refused(commands: Commands, refusal: Refusal, folder: Path, name: str, output: Path, cause: str) -> None:
    """Assert that the message names key, path, cause and remedy, and that nothing was created."""
    before = sorted(folder.rglob("*"))
    message = refusal(commands.line(name, output))
    assert message.startswith(f"{KEYS[name]}: {output}"), message
    assert re.search(f": cannot be written: {cause}.*; expected a .*name ", message), message
    assert sorted(folder.rglob("*")) == before


# A disk that fills


def fill(disk: Path, num_bytes_left: int) -> None:
    """Fill the disk up to a number of free bytes, a multiple of the page size."""
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(b"\0" * (free - num_bytes_left))
    assert shutil.disk_usage(disk).free == num_bytes_left


def has_only_unfinished_files(folder: Path) -> bool:
    """Whether all files that a command left, apart from locks, are marked as unfinished."""
    left = [path.name for path in folder.iterdir() if path.name != "filler" and not path.name.endswith(".lock")]
    return all(name.endswith(".unfinished") for name in left)


def test_prepare_stops_on_a_full_disk_and_resumes_with_more_space(
    commands: Commands, refusal: Refusal, disk: Path, tmp_path: Path
):
    rows = write_conversations(tmp_path / "rows.jsonl", [(f"what is {n}?", f"{n} " * 200) for n in range(2000)])
    line = commands.line("prepare", disk / "store")
    line[1] = str(rows)
    message = refusal(line)
    assert message.startswith(f"--output: {disk}/store: cannot be written: No space left on device (")
    assert "bytes free there); expected a folder that can be written, with room for the store: make room" in message
    assert [path.name for path in disk.iterdir()] == []  # no shard was finished
    remount(disk, "size=64M")
    assert main(line) == 0 and len(TokenStore(disk / "store")) == 2000


def test_prepare_leaves_only_unfinished_files_wherever_the_disk_fills(commands: Commands, disk: Path, tmp_path: Path):
    """Fill the disk at every third page, from the first that `prepare` writes to the last one of the store."""
    line = commands.line("prepare", disk / "store")
    assert main(commands.line("prepare", tmp_path / "straight")) == 0
    num_pages, code = 0, UserError.EXIT_CODE
    while code != 0:
        shutil.rmtree(disk / "store.unfinished", ignore_errors=True)
        fill(disk, num_pages * os.sysconf("SC_PAGE_SIZE"))
        code = main(line)
        assert code == 0 or (code == UserError.EXIT_CODE and has_only_unfinished_files(disk))
        (disk / "filler").unlink()
        num_pages += 3
    assert num_pages > 9
    names = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert names == sorted(path.name for path in (disk / "store").iterdir())
    assert all((disk / "store" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes() for name in names)


def test_a_disk_that_fills_while_the_cache_is_written_is_named(
    commands: Commands, refusal: Refusal, disk: Path, tmp_path: Path
):
    fill(disk, 4 * os.sysconf("SC_PAGE_SIZE"))
    message = refusal(commands.line("train, cache", disk / "cache"))
    assert message.startswith(f"data.cache_dir: {disk}/cache/train-") and "No space left on device" in message
    assert "Restore" not in message and "malformed" not in message
    assert has_only_unfinished_files(disk / "cache") and not (tmp_path / "scratch").exists()


def test_a_disk_that_is_full_at_the_start_of_a_run_is_named(commands: Commands, refusal: Refusal, disk: Path):
    (disk / "output").mkdir()
    fill(disk, 0)
    message = refusal(commands.line("train", disk / "output"))
    assert message.startswith(
        f"run.output_dir: {disk}/output: cannot be written: No space left on device (0 bytes free"
    )
    assert has_only_unfinished_files(disk / "output")


@pytest.mark.parametrize("room", ["for nothing", "for the weights"])
def test_an_export_to_a_disk_that_is_too_small_leaves_nothing(
    commands: Commands, refusal: Refusal, disk: Path, run: Path, room: str
):
    masters = sum(tensor.nbytes for tensor in make_trained_masters(commands.setup.untied, lora=False).values())
    page = os.sysconf("SC_PAGE_SIZE")
    fill(disk, page * (4 if room == "for nothing" else -(-masters // page) + 2))
    message = refusal(commands.line("export", disk / "model"))
    assert message.startswith(f"--output: {disk}/model: ")
    words = f"bytes free; expected {masters:,} for the weights" if room == "for nothing" else "No space left on device"
    assert words in message
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("name", ["reference", "fidelity"])
def test_a_result_on_a_full_disk_leaves_nothing(commands: Commands, refusal: Refusal, disk: Path, name: str):
    (disk / "place").mkdir()
    fill(disk, 0)
    output = disk / "place" / "result.npz" if name == "reference" else disk / "place"
    message = refusal(commands.line(name, output))
    assert message.startswith(f"--output: {output}: cannot be written: No space left on device")
    assert list((disk / "place").iterdir()) == []


# Files that cannot be read


@contextmanager
def as_another_user() -> Iterator[None]:
    """Become the user nobody inside the block if this is root, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can read, unlike the folders of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="vcore_ds_test_"))
    folder.chmod(0o755)
    yield folder
    for inner in folder.iterdir():
        inner.chmod(0o700)
    shutil.rmtree(folder)


def open_to_all(folder: Path) -> Path:
    """Let every user read the files of a folder, since weights are written for their owner alone."""
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


@pytest.mark.parametrize("what", ["file", "folder", "store"])
def test_data_without_permission_is_named(
    refusal: Refusal, public: Path, setup: TinySetup, commands: Commands, what: str
):
    model = open_to_all(write_model(public / "model"))
    data = write_conversations(public / "train.jsonl", sums(range(12)))
    if what == "folder":
        (public / "data").mkdir()
        data = data.rename(public / "data" / "train.jsonl")
        locked, expected = data.parent, "data, or a token store, that can be read"
    elif what == "store":
        assert main(["prepare", str(data), "--tokenizer", str(model), "--output", str(public / "store")]) == 0
        data, locked = public / "store", public / "store" / "manifest.json"
        expected = "a token store that can be read"
    else:
        locked, expected = data, "data that can be read"
    (public / "runs").mkdir()
    (public / "runs").chmod(0o777)
    changes = [f"data.train_path={data}", "data.validation_path=null", f"data.cache_dir={public}/runs"]
    overrides = setup.overrides(public / "runs" / "output", *changes, model=model)
    locked.chmod(0)
    try:
        with as_another_user():
            message = refusal(["train", str(RECIPE), *overrides])
    finally:
        locked.chmod(0o700)
    assert message.startswith(f"{data}: cannot be read: Permission denied"), message
    assert f"; expected {expected}: change its permissions, or name another one" in message
    assert list((public / "runs").iterdir()) == []


def test_a_run_without_permission_is_named(refusal: Refusal, public: Path, commands: Commands):
    (public / "run").mkdir(mode=0)
    with as_another_user():
        message = refusal(["export", str(public / "run")])
        assert message.startswith(f"RUN: {public}/run: cannot be read: Permission denied"), message
        message = refusal(commands.line("check", public / "run" / "inner"))
        assert message.startswith(f"run.output_dir: {public}/run/inner: cannot be written: Permission denied"), message


def test_a_checkpoint_without_permission_does_not_verify(
    refusal: Refusal, public: Path, run: Path, setup: TinySetup, commands: Commands
):
    copied = shutil.copytree(run, public / "run")
    recipe = (copied / "recipe.yaml").read_text()
    model = open_to_all(shutil.copytree(setup.untied, public / "model"))
    (copied / "recipe.yaml").write_text(recipe.replace(str(setup.untied), str(model)))
    state = next((copied / "checkpoints" / "step_00000020" / "state").glob("*.distcp"))
    state.chmod(0)
    (public / "export").mkdir()
    (public / "export").chmod(0o777)
    with as_another_user():
        message = refusal(["export", str(copied), "--output", str(public / "export" / "model")])
    assert "found no checkpoint that verifies:\n  step_00000020: state/" in message
    assert f"{state.name}: cannot be read: " in message and "Permission denied" in message
    assert list((public / "export").iterdir()) == []


def test_errors_of_libraries_in_rust_are_recognized(tmp_path: Path):
    written = f"^--output: {tmp_path}: cannot be written"
    missing, other = f"{written}: No such file or directory; expected", f"{written}: Is a directory; expected"
    with pytest.raises(UserError, match=missing), writing("--output", tmp_path):
        save_file({"a": torch.zeros(1)}, "/proc/a.safetensors")
    with pytest.raises(UserError, match=other), writing("--output", tmp_path):
        make_tokenizer().backend_tokenizer.save(str(tmp_path))


def test_an_error_on_another_path_keeps_its_name(tmp_path: Path):
    expected = r"^/dev/null/x: cannot be used: Not a directory; expected to be, while --out"
    with pytest.raises(UserError, match=expected), writing("--output", tmp_path / "store"):
        json.loads(Path("/dev/null/x").read_text())
