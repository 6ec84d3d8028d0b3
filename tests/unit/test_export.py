"""Export of a checkpoint to a Hugging Face folder: the same weights, and either a complete folder or none."""

import io
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.helpers import tiny
from tests.helpers.allocations import Allocations
from tests.helpers.commands import HANG_SECONDS
from tests.helpers.exports import load_tensors, write_checkpoint, write_run
from tests.helpers.setups import write_model
from tests.helpers.tokenizer import CHATML
from vcore_ds.commands.chat import export_unfinished
from vcore_ds.commands.cli import main
from vcore_ds.commands.export import write
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.generation import end_token_ids
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.common.errors import UserError
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models import model_folder as files
from vcore_ds.models.model_folder import add_end_tokens, describe_end_tokens
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.training.model_card import write_without_weights
from vcore_ds.training.run_folder import read_run_recipe

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")

PROMPT = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(5))


def make_trained_masters(base: Path, lora: bool) -> dict[str, Tensor]:
    """Name in the engine -> fp32 parameter, as after some training, so that no value is exact in bf16."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if lora:
        model = tiny.with_lora(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(7)
    return {f"causal_lm.{name}": p.detach() + 0.01 * torch.randn(p.shape, generator=generator) for name, p in named}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path_factory) -> Path:
    """A base model in bf16, as models are published."""
    folder = write_model(tmp_path_factory.mktemp("base") / "base", tied=request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    settings = {"do_sample": False, "temperature": 0.6, "eos_token_id": 258}  # transformers would refuse to save these
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def full_run(base, tmp_path) -> Path:
    return write_run(tmp_path / "run", base, make_trained_masters(base, lora=False), lora=False)


@pytest.fixture
def lora_run(base, tmp_path) -> Path:
    return write_run(tmp_path / "run", base, make_trained_masters(base, lora=True), lora=True)


def compute_logits(model) -> Tensor:
    for parameter in model.parameters():
        # Copied out of the mapped file: its alignment decides the order in which kernels sum.
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return model.eval()(PROMPT).logits


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_full_weights_are_the_masters_rounded_once(base, full_run, dtype):
    folder = export_run(full_run, dtype=dtype, max_file_bytes=20_000)
    assert folder == full_run / "export" / "step_00000020" / "model"
    wanted = torch.float32 if dtype == "fp32" else torch.bfloat16
    masters = {
        name.removeprefix("causal_lm."): tensor for name, tensor in make_trained_masters(base, lora=False).items()
    }
    exported = load_tensors(folder)
    assert exported.keys() == masters.keys()
    assert all(torch.equal(exported[name], tensor.to(wanted)) for name, tensor in masters.items())
    is_tied = AutoConfig.from_pretrained(base).tie_word_embeddings
    assert ("lm_head.weight" in exported) is not is_tied

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) >= 3
    assert index["weight_map"].keys() == masters.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported.values())

    assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    assert (folder / "generation_config.json").read_text() == (base / "generation_config.json").read_text()
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (folder, base))
    assert {key for key in theirs if ours.get(key) != theirs[key]} <= {"transformers_version", "dtype"}

    model = AutoModelForCausalLM.from_pretrained(folder)  # no dtype: the configuration says it
    assert model.dtype == wanted
    trained = AutoModelForCausalLM.from_pretrained(base, dtype=wanted)
    trained.load_state_dict({name: tensor.to(wanted) for name, tensor in masters.items()}, strict=not is_tied)
    assert torch.equal(compute_logits(model), compute_logits(trained))


def test_generation_stops_where_turns_end_in_training(base, tmp_path):
    """A base model ends texts with another token, and has learned to end turns with that of a ChatML template."""
    own, end = 256, 258
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [own, end]
    settings = {"do_sample": True, "temperature": 0.6, "eos_token_id": own}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (sentence,) = describe_end_tokens(str(folder), tokenizer)
    assert "<|im_end|>" in sentence and "generation_config.json" in sentence
    assert end_token_ids(GenerationConfig.from_pretrained(folder), tokenizer) == [own, end]
    run = write_run(tmp_path / "run", folder, make_trained_masters(folder, lora=False), lora=False)
    exported = export_run(run)
    assert json.loads((exported / "generation_config.json").read_text()) == settings | {"eos_token_id": [own, end]}
    assert describe_end_tokens(str(exported), tokenizer) == describe_end_tokens(str(base), tokenizer) == []
    for file in (folder / "generation_config.json", exported / "generation_config.json"):
        file.unlink()  # then config.json says it
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"eos_token_id": own}))
    add_end_tokens(exported, tokenizer)
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": [own, end]}


def test_the_adapter_loads_in_peft(base, lora_run):
    folder = export_run(lora_run)
    assert folder == lora_run / "export" / "step_00000020" / "adapter"
    exported = load_tensors(folder)
    masters = make_trained_masters(base, lora=True)
    expected = {name.removeprefix("causal_lm.").replace(".default", ""): t for name, t in masters.items()}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 12, str(base))
    public = export_run(lora_run, base_model="owner/base", output=lora_run / "public")
    assert json.loads((public / "adapter_config.json").read_text()) == config | {
        "base_model_name_or_path": "owner/base"
    }
    assert metadata_load(public / "README.md")["base_model"] == "owner/base"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = compute_logits(plain)
    adapted = PeftModel.from_pretrained(plain, folder)
    assert float((compute_logits(adapted) - before).abs().max()) > 1e-2
    assert export_run(lora_run, output=lora_run / "bf16", dtype="bf16") == lora_run / "bf16"
    assert {tensor.dtype for tensor in load_tensors(lora_run / "bf16").values()} == {torch.bfloat16}


def test_merged_weights_are_the_base_plus_the_scaled_product_rounded_once(base, lora_run):
    merged = load_tensors(export_run(lora_run, merge=True, max_file_bytes=20_000))
    trained = make_trained_masters(base, lora=True)
    exact = {name: tensor.double() for name, tensor in load_tensors(base).items()}
    num_merged = 0
    for name in exact:
        pair = [f"causal_lm.base_model.model.{name.removesuffix('.weight')}.lora_{x}.default.weight" for x in "AB"]
        if pair[0] in trained:
            a, b = (trained[part].double() for part in pair)
            exact[name] += (12 / 4) * b @ a
            num_merged += 1
    assert num_merged == 2 * 7  # layers, linear layers in each
    assert merged.keys() == exact.keys()
    for name, value in exact.items():
        assert merged[name].dtype == torch.bfloat16
        # The nearest bf16 value, up to the rounding of the sum in fp32.
        nearest = (value.to(torch.bfloat16).double() - value).abs()
        assert bool(((merged[name].double() - value).abs() <= nearest + 1e-8).all()), name


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_the_rehearsal_of_a_result_writes_all_its_files(base, tmp_path, kind):
    is_lora = kind == "adapter"
    run = write_run(tmp_path / "run", base, make_trained_masters(base, is_lora), lora=is_lora)
    exported, rehearsed = export_run(run), run / "rehearsed"
    recipe = read_run_recipe(run)
    write_without_weights(recipe.model, recipe.lora, load_tokenizer(str(base)), "# Card", rehearsed)
    assert {path.name for path in rehearsed.iterdir()} == {path.name for path in exported.iterdir()}
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        if (exported / name).exists():
            assert (rehearsed / name).read_text() == (exported / name).read_text()
    if kind == "adapter":
        tensors = load_tensors(rehearsed)
        assert tensors.keys() == load_tensors(exported).keys() and not any(map(torch.numel, tensors.values()))


def test_the_newest_checkpoint_that_verifies_is_exported(base, full_run, capsys):
    changed = {name: tensor + 1 for name, tensor in make_trained_masters(base, lora=False).items()}
    newest = write_checkpoint(full_run, 30, changed)
    assert export_run(full_run).parent.name == "step_00000030"
    named = export_run(full_run, checkpoint="step_00000020")
    assert named.parent.name == "step_00000020"
    shutil.rmtree(full_run / "export")
    path = max((newest / "state").glob("*.distcp"), key=lambda path: path.stat().st_size)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert export_run(full_run).parent.name == "step_00000020"
    assert "skipped checkpoint step_00000030: state/" in capsys.readouterr().out
    with pytest.raises(UserError, match="no checkpoint that verifies:\n  step_00000030: .*SHA-256"):
        export_run(full_run, checkpoint="step_00000030")
    (full_run / "checkpoints" / "step_00000020" / "COMPLETE").unlink()
    with pytest.raises(UserError, match="no checkpoint that verifies:(.|\n)*step_00000020: no COMPLETE"):
        export_run(full_run)


def test_only_an_export_of_the_same_weights_is_reused(base, full_run, monkeypatch):
    """A run that is extended goes back some steps, and then writes other checkpoints under the same names. A second
    chat replaces the export when the first one has loaded it."""

    def chat() -> Path:
        with export_unfinished(str(full_run)) as path:
            return Path(path)

    mine, folder = export_run(full_run), chat()
    written = (folder / "README.md").stat().st_mtime_ns
    with ThreadPoolExecutor() as pool, export_unfinished(str(full_run)):
        assert (folder / "README.md").stat().st_mtime_ns == written
        masters = make_trained_masters(base, lora=False)
        checkpoint = write_checkpoint(full_run, 20, {name: tensor + 1 for name, tensor in masters.items()})
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        second = pool.submit(chat)
        while "waiting" not in sys.stderr.getvalue() and not second.done():
            time.sleep(0.01)
        assert not second.done() and (folder / "README.md").stat().st_mtime_ns == written
    assert second.result(HANG_SECONDS) == folder
    digests = [metadata_load(each / "README.md")["checkpoint"] for each in (folder, mine)]
    assert digests[0] == (checkpoint / "COMPLETE").read_text().strip() != digests[1]  # which is the user's


def test_a_base_model_that_has_changed_is_not_merged(base, tmp_path):
    model = Path(shutil.copytree(base, tmp_path / "base"))
    run = write_run(tmp_path / "run", model, make_trained_masters(base, lora=True), lora=True)
    card = export_run(run, output=run / "adapter") / "README.md"
    card.write_text(card.read_text().replace("---", f"---\nbase_digest: {compute_model_digest(str(model))}", 1))
    shutil.rmtree(run / "checkpoints")
    export_run(run, merge=True, output=tmp_path / "merged")
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * x for name, x in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="model.path: .* other weights"):
        export_run(run, merge=True)
    with pytest.raises(UserError, match=r"RUN\|MODEL: .*is not the base model"):
        find_named_model(str(run))


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_one_message(base, full_run, monkeypatch, capsys):
    find = write.find_trained_weights

    def find_and_delete(*arguments):
        trained = find(*arguments)
        shutil.rmtree(full_run / "checkpoints" / trained.name)
        return trained

    monkeypatch.setattr(write, "find_trained_weights", find_and_delete)
    assert main(["export", str(full_run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_00000020/state" in line and "No such file" in line
    assert [*(full_run / "export").rglob("*.safetensors")] == []


@pytest.mark.parametrize("merge", [False, True], ids=["full", "merged"])
def test_memory_holds_one_file_and_one_tensor(tmp_path, merge):
    base = write_model(tmp_path / "base")
    tiny.qwen3(vocab_size=259, num_hidden_layers=12, dtype=torch.bfloat16).save_pretrained(base)
    run = write_run(tmp_path / "run", base, make_trained_masters(base, lora=merge), lora=merge)
    with Allocations() as allocations:
        folder = export_run(run, merge=merge, max_file_bytes=40_000)
    sizes = [tensor.nbytes for tensor in load_tensors(folder).values()]
    print(f"peak {allocations.peak_bytes:,} of {sum(sizes):,}; largest tensor {max(sizes):,}")
    # A file, and one tensor in fp32 as it is read and merged.
    assert allocations.peak_bytes < 40_000 + 5 * max(sizes) < sum(sizes) / 2


# ---- failures leave no incomplete folder -----------------------------------------------------------------------------


def fail_in_file(monkeypatch, number: int, action) -> None:
    """Call `action` after file `number` of an export has been written."""
    original, count = files.write_file, iter(range(1, 1000))

    def write_file(*arguments):
        original(*arguments)
        if next(count) == number:
            action()

    monkeypatch.setattr(files, "write_file", write_file)


def test_an_interrupted_export_leaves_nothing(full_run, monkeypatch):
    """Until then a second one into the same folder is refused."""

    def interrupt():
        with pytest.raises(UserError, match=r"--output: .*/out/model: "):
            export_run(full_run, output=full_run / "out" / "model")
        raise KeyboardInterrupt

    fail_in_file(monkeypatch, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_run(full_run, output=full_run / "out" / "model", max_file_bytes=20_000)
    assert not (full_run / "out").exists()


def test_an_export_that_is_killed_leaves_no_folder_of_that_name(full_run, monkeypatch):
    output = full_run / "out" / "model"
    child = os.fork()
    if child == 0:
        fail_in_file(monkeypatch, 2, lambda: os._exit(9))  # like kill -9: no handler runs
        export_run(full_run, output=output, max_file_bytes=20_000)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert sorted(path.name for path in (full_run / "out").iterdir()) == [".model.lock", "model.unfinished"]
    export_run(full_run, output=output, max_file_bytes=20_000)  # which removes what is left
    assert [path.name for path in (full_run / "out").iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": torch.full((6,), torch.inf)}, "a: not all values are finite"),
        ({"a": torch.ones(2, 3)}, r"a: found \(2, 3\) torch.float32; expected \(6,\)"),
        ({"a": torch.ones(6).half()}, "found .* torch.float16; expected .*float32"),
        ({"c": torch.ones(1)}, "missing or unexpected names: c"),
    ],
)
def test_a_written_file_is_read_back_and_compared(tmp_path, changes, words):
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2)}
    expected = {name: tensor.to("meta") for name, tensor in tensors.items()}
    files.write_file(tmp_path / "good.safetensors", tensors, expected)
    with safe_open(tmp_path / "good.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(files.BadExport, match=words):
        files.write_file(tmp_path / "bad.safetensors", tensors | changes, expected)


def test_a_parameter_that_is_not_finite_is_not_exported(base, tmp_path):
    masters = make_trained_masters(base, lora=False)
    masters["causal_lm.model.norm.weight"][3] = torch.nan
    run = write_run(tmp_path / "run", base, masters, lora=False)
    with pytest.raises(files.BadExport, match="model.norm.weight: not all values are finite"):
        export_run(run)
    assert not (run / "export" / "step_00000020").exists()


def test_a_full_disk_is_reported_before_anything_is_written(full_run, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match="found 1,000 bytes free"):
        export_run(full_run)


# ---- mistakes of the user --------------------------------------------------------------------------------------------


def read_refusal(capsys, *arguments: object) -> str:
    """The message of `vcore-ds export` that ends with exit code 2."""
    capsys.readouterr()
    assert main(["export", *map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("vcore-ds: ") and "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data"], "data: found no recipe.yaml there; expected a run's folder"),
        (["run", "--checkpoint", "step_00000021"], "expected step_00000021; found step_00000020"),
        (["run", "--output", "data"], "--output: data: is there already; expected a new folder"),
        (["run", "--merge"], "found --merge with a run that trained all parameters"),
        (["run", "--merge", "other"], "export: found other; expected no more than its --help"),
        (["run", "--base-model", "/home/me/model"], "--base-model: found /home/me/model; expected OWNER/NAME"),
        (["unfinished"], "expected a complete checkpoint; found none"),
    ],
)
def test_what_cannot_be_exported_is_refused(full_run, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    shutil.copytree(full_run, tmp_path / "unfinished", ignore=shutil.ignore_patterns("checkpoints"))
    assert message in read_refusal(capsys, *words)


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_missing_or_different_base_model_is_refused(lora_run, tmp_path, capsys, kind):
    options = ["--merge"] if kind == "merged" else []
    recipe = (lora_run / "recipe.yaml").read_text()
    (lora_run / "recipe.yaml").write_text(recipe.replace("/base\n", "/elsewhere\n"))
    message = read_refusal(capsys, lora_run, *options)
    assert "model.path: " in message and "/elsewhere: no such folder" in message
    other_base = write_model(tmp_path / "other")
    tiny.qwen3(vocab_size=259, num_hidden_layers=1).save_pretrained(other_base)
    (lora_run / "recipe.yaml").write_text(recipe.replace(recipe.split("path: ")[1].split("\n")[0], str(other_base), 1))
    message = read_refusal(capsys, lora_run, *options)
    assert "does not match the trained parameters: base_model.model.model.layers.1" in message
    assert not (lora_run / "export").exists()


def test_a_base_model_without_a_tensor_is_refused(lora_run, base, tmp_path, capsys):
    other_base = shutil.copytree(base, tmp_path / "other")
    weights = load_file(other_base / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, other_base / "model.safetensors", metadata={"format": "pt"})
    recipe = (lora_run / "recipe.yaml").read_text()
    (lora_run / "recipe.yaml").write_text(recipe.replace(str(base), str(other_base)))
    assert "found no tensor model.norm.weight" in read_refusal(capsys, lora_run, "--merge")
