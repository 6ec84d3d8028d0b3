"""Model folders: one that cannot be trained is refused, naming model.path, before anything is started."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import tiny
from tests.helpers.setups import write_model
from vcore_ds.common.errors import UserError
from vcore_ds.models import description
from vcore_ds.models.architecture_check import check_model_folder, count_parameters
from vcore_ds.models.causal_lm import load_causal_lm
from vcore_ds.models.description import read_model
from vcore_ds.models.stored_weights import find_stored_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("one_file") / "model")


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_parts") / "model"
    tiny.qwen3().save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def load(folder: Path) -> torch.nn.Module:
    return load_causal_lm(str(folder), dtype=torch.float32, attention="sdpa", gradient_checkpointing=False)


def read_refusal(folder: Path, check: Callable = lambda folder: check_model_folder(str(folder))) -> str:
    with pytest.raises(UserError) as error:
        check(folder)
    message = str(error.value)
    assert message.startswith(f"model.path: {folder}: ") and "\n" not in message
    return message


def write_config(folder: Path, **changes: object) -> None:
    """`...` removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("folder", ["one_file", "in_parts"])
def test_complete_folders_pass(folder: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    check_model_folder(str(path))
    assert load(path).config.vocab_size


CONFIGS = {
    "list": ("[]", "found list, expected a JSON object"),
    "number": ("3", "found int, expected a JSON object"),
    "no JSON": ("{", "config.json: not JSON"),
    "no text": (b"\xff\xfe", "config.json: not JSON"),
    "nested": ("[" * 100_000, "config.json: not JSON"),
    "empty": ("{}", "found no model_type"),
}


@pytest.mark.parametrize(("content", "reason"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_configuration_that_is_no_json_object_is_refused(
    one_file: Path, tmp_path: Path, content: str | bytes, reason: str
) -> None:
    folder = shutil.copytree(one_file, tmp_path / "model")
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert reason in read_refusal(folder)


CHANGES = {
    "hidden_size": (dict(hidden_size=48), r"found model.embed_tokens.weight [259, 32], expected [259, 48]"),
    "vocab_size": (dict(vocab_size=100), "embed_tokens.weight [259, 32], expected [100, 32] (1 more weights"),
    "no vocab_size": (dict(vocab_size=...), "[259, 32], expected [151936, 32]"),
    "fewer heads": (dict(num_attention_heads=2), "q_proj.weight [32, 32], expected [16, 32]"),
    "heads that do not divide": (dict(num_key_value_heads=3), "k_proj.weight [16, 32], expected [24, 32]"),
    "no heads": (dict(num_attention_heads=0), "no qwen3 can be built from its values: ZeroDivisionError"),
    "more layers": (
        dict(num_hidden_layers=3, layer_types=...),
        "num_hidden_layers: found 3, expected 2, the number of layers in the weights",
    ),
    "fewer layers": (dict(num_hidden_layers=1, layer_types=...), "num_hidden_layers: found 1, expected 2"),
    "inconsistent layers": (dict(num_hidden_layers=3), "must be equal to the number of `layer_types`"),
    "mistyped size": (dict(hidden_size="x"), "Field 'hidden_size' expected int, got str"),
    "null": (dict(vocab_size=None), "Field 'vocab_size' expected int, got NoneType"),
    "negative size": (dict(intermediate_size=-1), "no qwen3 can be built from its values"),
    "unknown activation": (dict(hidden_act="foo"), "no qwen3 can be built from its values: KeyError: 'foo'"),
    "unknown dtype": (dict(dtype="float99"), "does not describe a model of type 'qwen3'"),
    "mistyped model_type": (dict(model_type=5), "found no model_type"),
    "unknown model_type": (dict(model_type="foo"), "model_type 'foo' is unknown to transformers "),
    "encoder": (dict(model_type="bert"), "'bert' is an encoder"),
    "embedding model": (dict(is_causal=False), "'qwen3' is an encoder, whose attention is not causal"),
    "embedding model of Gemma": (
        # Qwen's rotary parameters do not describe a Gemma, which transformers 5.17 notices first.
        dict(model_type="gemma3_text", use_bidirectional_attention=True, sliding_window=8, rope_parameters=...),
        "'gemma3_text' is an encoder",
    ),
    "seq2seq": (dict(model_type="t5"), "'t5' is not a decoder-only language model"),
    "vision model": (dict(model_type="vit"), "'vit' is not a decoder-only language model"),
    "vision-language model": (
        dict(model_type="paligemma"),
        "'paligemma' is not among the vision-language models whose language model is trained (gemma3",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_a_configuration_that_does_not_fit_the_weights_is_refused(
    one_file: Path, tmp_path: Path, changes: dict, reason: str
) -> None:
    folder = shutil.copytree(one_file, tmp_path / "model")
    write_config(folder, **changes)
    assert reason in read_refusal(folder)


def rename_first_part(folder: Path) -> None:
    part = min(folder.glob("*.safetensors"))
    part.rename(part.with_name("elsewhere.bin"))


def change_index(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(index))

    return change


PARTS = {
    "missing part": (rename_first_part, "model-00001-of-"),
    "no index": (lambda f: (f / INDEX).unlink(), "nor model.safetensors.index.json"),
    "index that is a list": (lambda f: (f / INDEX).write_text("[]"), "found no weight_map"),
    "index of files elsewhere": (change_index(a="../a.safetensors"), "found no weight_map"),
    "index of another model": (change_index(a="model-00001-of-00003.safetensors"), "download the model again"),
    "truncated part": (
        lambda f: (p := min(f.glob("*.safetensors"))).write_bytes(p.read_bytes()[:-8]),
        ".safetensors: not a complete",
    ),
    "longer part": (
        lambda f: (p := min(f.glob("*.safetensors"))).write_bytes(p.read_bytes() + b"x"),
        ".safetensors: not a complete",
    ),
    "no header": (lambda f: min(f.glob("*.safetensors")).write_bytes(b"x" * 999), ".safetensors: not a complete"),
    "empty part": (lambda f: min(f.glob("*.safetensors")).write_bytes(b""), ".safetensors: not a complete"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "expected all weights, as safetensors"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "no configuration can be read: "),
}


@pytest.mark.parametrize(("breaks", "reason"), PARTS.values(), ids=PARTS.keys())
def test_incomplete_weights_are_refused(in_parts: Path, tmp_path: Path, breaks: Callable, reason: str) -> None:
    folder = shutil.copytree(in_parts, tmp_path / "model")
    breaks(folder)
    assert reason in read_refusal(folder)


def test_weights_without_a_head_are_refused_while_loading(one_file: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(one_file, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "found no weights for lm_head.weight, which would be initialised at random" in read_refusal(folder, load)


def test_a_model_is_read_and_built_once_while_its_files_stay_the_same(
    one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, built = str(shutil.copytree(one_file, tmp_path / "model")), []
    build = description.build_empty_model
    monkeypatch.setattr(description, "build_empty_model", lambda path, *_: built.append(path) or build(path, *_))
    first = read_model(folder)
    check_model_folder(folder)
    assert count_parameters(folder, None).all == sum(p.numel() for p in load(Path(folder)).parameters())
    weights = find_stored_weights(folder)
    assert built == [folder] and read_model(folder) is first
    for file in ("config.json", "model.safetensors"):
        before = read_model(folder)
        (tmp_path / "model" / file).write_bytes((tmp_path / "model" / file).read_bytes() + b" ")
        assert read_model(folder) is not before
    assert weights.tensors.keys() == first.stored.keys() == load_file(one_file / "model.safetensors").keys()
