"""The digest of a model changes with any of its weights, in every format, and of large files reads samples."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import tiny
from tests.helpers.setups import write_model
from vcore_ds.common import digests
from vcore_ds.common.errors import UserError
from vcore_ds.models.loading import load_causal_lm
from vcore_ds.models.model_identity import RULE, compute_model_digest


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in one file, in parts, and as torch.save writes them, in one file and in parts."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "single")
    tiny.qwen3().save_pretrained(folder / "parts", max_shard_size="40KB")
    weights = load_file(folder / "single" / "model.safetensors")
    for name in ("bin", "bin_parts"):
        (folder / name).mkdir()
        shutil.copy(folder / "single" / "config.json", folder / name)
    torch.save(weights, folder / "bin" / "pytorch_model.bin")
    names = sorted(weights)
    files = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, part in files.items():
        torch.save({name: weights[name] for name in part}, folder / "bin_parts" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "bin_parts" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in ("bin", "bin_parts"):  # transformers reads them
        load_causal_lm(str(folder / name), dtype=torch.float32, attention="sdpa", gradient_checkpointing=False)
    return folder


FORMATS = ("single", "parts", "bin", "bin_parts")


@pytest.fixture(params=[True, False], ids=["complete", "sampled"])
def reads_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
    return request.param


def change_tensor(file: Path, number: int) -> None:
    """Add 1 to every value of a tensor, as a merged adapter changes a whole matrix."""
    is_safe = file.suffix == ".safetensors"
    weights = load_file(file) if is_safe else torch.load(file, weights_only=True)
    name = sorted(weights)[number]
    weights[name] = weights[name] + 1
    save_file(weights, file, metadata={"format": "pt"}) if is_safe else torch.save(weights, file)


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_is_in_the_digest(models: Path, tmp_path: Path, name: str, reads_all: bool) -> None:
    first = compute_model_digest(str(models / name))
    assert first.startswith(RULE) and first == compute_model_digest(str(models / name))
    files = sorted(path for path in (models / name).iterdir() if path.suffix in (".safetensors", ".bin"))
    found = {first}
    for file in files:
        tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        for number in range(len(tensors)):
            copy = tmp_path / f"{file.stem}_{number}"
            shutil.copytree(models / name, copy)
            change_tensor(copy / file.name, number)
            assert (copy / file.name).stat().st_size == file.stat().st_size
            found.add(compute_model_digest(str(copy)))
            shutil.rmtree(copy)
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
    "index": ("bin_parts", lambda folder: write_json(folder / "pytorch_model.bin.index.json", metadata={"a": 1})),
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
    shutil.copytree(models / "bin_parts", tmp_path / "copy")
    (tmp_path / "copy" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(
        UserError, match=r"copy: found no pytorch_model-00002-of-00002.bin, which pytorch_model.bin.ind"
    ):
        compute_model_digest(str(tmp_path / "copy"))
    (tmp_path / "copy" / "pytorch_model.bin.index.json").write_text("[]")
    with pytest.raises(UserError, match="found no weight_map of names to files"):
        compute_model_digest(str(tmp_path / "copy"))
    (tmp_path / "copy" / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(
        UserError, match="found no model.safetensors or pytorch_model.bin in .*download the model first"
    ):
        compute_model_digest(str(tmp_path / "copy"))


def test_a_tensor_larger_than_a_step_is_sampled_along_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several fused experts may differ, in the middle of a tensor."""
    monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
    (tmp_path / "config.json").write_text("{}")
    writers = {"model.safetensors": save_file, "pytorch_model.bin": torch.save}
    experts = torch.zeros(3, 1280, 1024)  # 5 MiB each
    found = set()
    for changed in (None, 0, 1, 2):
        tensor = experts.clone()
        if changed is not None:
            tensor[changed] += 1
        for name, write in writers.items():
            write({"small": torch.ones(2), "experts": tensor}, tmp_path / name)
            found.add(compute_model_digest(str(tmp_path)))
            (tmp_path / name).unlink()
    assert len(found) == 8


def test_a_file_that_is_no_safetensors_file_is_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    assert compute_model_digest(str(tmp_path)).startswith(RULE)
