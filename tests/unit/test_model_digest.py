"""The digest of a model changes with any of its weights, and of large files reads samples."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import tiny
from tests.helpers.setups import write_model
from vcore_ds.common import paths
from vcore_ds.common.errors import UserError
from vcore_ds.models.model_identity import RULE, compute_model_digest


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in one file and in parts."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "single")
    tiny.qwen3().save_pretrained(folder / "parts", max_shard_size="40KB")
    return folder


@pytest.fixture(params=[True, False], ids=["complete", "sampled"])
def reads_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(paths, "WHOLE_BYTES", 0)
    return request.param


@pytest.mark.parametrize("name", ["single", "parts"])
def test_every_tensor_is_in_the_digest(models: Path, tmp_path: Path, name: str, reads_all: bool) -> None:
    first = compute_model_digest(str(models / name))
    assert first.startswith(RULE) and first == compute_model_digest(str(models / name))
    found = {first}
    copy = shutil.copytree(models / name, tmp_path / "copy")
    for file in sorted(copy.glob("*.safetensors")):
        weights, before = load_file(file), file.read_bytes()
        for changed in weights:  # as a merged adapter changes a whole matrix
            save_file({key: x + (key == changed) for key, x in weights.items()}, file, metadata={"format": "pt"})
            assert file.stat().st_size == len(before)
            found.add(compute_model_digest(str(copy)))
        file.write_bytes(before)
    assert len(found) == 1 + len(load_file(models / "single" / "model.safetensors"))


def flip_region(file: Path) -> None:
    """Change bytes in the middle of the file."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        region = opened.read(64)
        opened.seek(-64, 1)
        opened.write(bytes(255 - byte for byte in region))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "configuration": ("single", lambda folder: write_json(folder / "config.json", rope_theta=7.0)),
    "index": ("parts", lambda folder: write_json(folder / "model.safetensors.index.json", metadata={"a": 1})),
    "the middle of a file": ("single", lambda folder: flip_region(folder / "model.safetensors")),
    "an adapter": ("single", lambda folder: (folder / "adapter_config.json").write_text("{}")),
}


def write_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("case", CHANGES)
def test_other_changes_of_a_model_change_its_digest(models: Path, tmp_path: Path, case: str) -> None:
    name, change = CHANGES[case]
    shutil.copytree(models / name, tmp_path / "copy")
    assert compute_model_digest(str(tmp_path / "copy")) == compute_model_digest(str(models / name))
    change(tmp_path / "copy")
    assert compute_model_digest(str(tmp_path / "copy")) != compute_model_digest(str(models / name))


def test_files_that_are_not_loaded_are_not_in_the_digest(models: Path, tmp_path: Path) -> None:
    """A cache of the hub gains files when another program asks for them."""
    shutil.copytree(models / "parts", tmp_path / "copy")
    for file in ("consolidated.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        (tmp_path / "copy" / file).write_text("{}")
    assert compute_model_digest(str(tmp_path / "copy")) == compute_model_digest(str(models / "parts"))


def test_weights_that_the_configuration_names_are_those_in_the_digest(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "single", tmp_path / "copy")
    shutil.copy(tmp_path / "copy" / "model.safetensors", tmp_path / "copy" / "other.safetensors")
    write_json(tmp_path / "copy" / "config.json", transformers_weights="other.safetensors")
    before = compute_model_digest(str(tmp_path / "copy"))
    flip_region(tmp_path / "copy" / "model.safetensors")
    assert compute_model_digest(str(tmp_path / "copy")) == before
    flip_region(tmp_path / "copy" / "other.safetensors")
    assert compute_model_digest(str(tmp_path / "copy")) != before


def test_weights_that_are_not_all_here_have_no_digest(models: Path, tmp_path: Path) -> None:
    """As in a cache of the hub that holds only the tokenizer or some of the weight files so far."""
    copy = shutil.copytree(models / "parts", tmp_path / "copy")
    index, part = copy / "model.safetensors.index.json", max(copy.glob("*.safetensors"))
    changes: dict[str, Callable[[], object]] = {
        f"found no {part.name}, which {index.name} names": part.unlink,
        "found no weight_map of names to files": lambda: index.write_text("[]"),
        "found no model.safetensors in .*download the model first": index.unlink,
    }
    for message, change in changes.items():
        change()
        with pytest.raises(UserError, match=message):
            compute_model_digest(str(copy))


def test_a_tensor_larger_than_a_step_is_sampled_along_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several fused experts may differ, in the middle of a tensor."""
    monkeypatch.setattr(paths, "WHOLE_BYTES", 0)
    (tmp_path / "config.json").write_text("{}")
    experts = torch.zeros(3, 1280, 1024)  # 5 MiB each
    found = set()
    for changed in ([], [0], [1], [2]):
        tensor = experts.clone()
        tensor[changed] += 1
        save_file({"small": torch.ones(2), "experts": tensor}, tmp_path / "model.safetensors")
        found.add(compute_model_digest(str(tmp_path)))
    assert len(found) == 4
