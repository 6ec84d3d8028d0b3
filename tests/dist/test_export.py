"""Exports of a run on 2 ranks, at its end and from its checkpoint: they compute what its engine computed."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import resumed_runs, tiny
from tests.helpers.exports import load_tensors
from tests.helpers.moe_models import write_moe_model
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations, write_deepspeed_config
from tests.helpers.soak import soak
from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.commands.export.write import export_run
from vcore_ds.config.schema import Recipe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.engine.export_shards import ExportFailed, save_hugging_face
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models import model_folder as files
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.training import run

pytestmark = pytest.mark.dist

NUM_STEPS = 2
MAX_FILE_BYTES = {"fp32": 30_000, "bf16": 15_000}
PROMPT = torch.randint(0, 256, (1, 21), generator=torch.Generator().manual_seed(1))
LORA = {"rank": 4, "alpha": 12.0, "dropout": 0.05}
ON_EXPERTS = {"rank": 4, "alpha": 12.0, "target_modules": ["all-linear", "experts"]}
CASES: dict[str, dict[str, Any]] = {
    "full, untied, fp32": {"precision": "fp32", "base": "untied"},
    "full, tied, bf16": {"precision": "bf16", "base": "tied"},
    "lora, untied, fp32": {"precision": "fp32", "base": "untied", "lora": LORA},
    "lora, tied, bf16": {"precision": "bf16", "base": "tied", "lora": LORA},
    "full, MoE model, bf16": {"precision": "bf16", "base": "moe_model"},
    "lora, MoE model, fp32": {"precision": "fp32", "base": "moe_model", "lora": ON_EXPERTS},
} | soak(
    {
        "full, tied, fp32": {"precision": "fp32", "base": "tied"},
        "full, untied, bf16": {"precision": "bf16", "base": "untied"},
    }
)
FULL = [name for name in CASES if name.startswith("full")]
ADAPTED = [name for name in CASES if name.startswith("lora")]


@dataclass
class Outcome:
    """One run's results on one rank."""

    folder: Path
    logits: Tensor
    """`[1, T, V]` of `PROMPT`, by the engine after training."""
    written: list[str] = field(default_factory=list)
    """Files of the export in small files that this rank wrote."""
    held_bytes: int = 0
    """Bytes of weights that this rank held for one file, at most."""
    failure: str = ""
    """The messages of all ranks when one of them cannot write its file."""


def make_recipe(folder: Path, name: str, *, precision: str, base: str, lora: dict | None = None) -> Recipe:
    return Recipe(
        model={"path": str(folder / base), "precision": precision},
        method={"kl_budget": 0.05},
        lora=lora,
        data={
            "train_path": str(folder / "train.jsonl"),
            # A forward that no backward follows, after which parameters are in flight when the export begins.
            "validation_path": str(folder / "held_out.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        batch={"global_size": 4},
        probe={"batch_size": 2},
        optimizer={"learning_rate": 1e-2},
        schedule={"num_steps": NUM_STEPS},
        run={"output_dir": str(folder / name.replace(", ", "_")), "num_followed_traces": 0},
        engine={"deepspeed_config": str(folder / f"{precision}.json")},
    )


def compute_engine_logits(engine: Engine) -> Tensor:
    sequence_layout = SequenceLayout.from_lengths([[PROMPT.shape[1]]] * len(PROMPT), 1, PROMPT.device)
    with engine.without_gradient():
        hidden = engine.module.decoder(
            input_ids=PROMPT, use_cache=False, sequence_layout=sequence_layout
        ).last_hidden_state
        return engine.module.base.get_output_embeddings()(hidden)


def export_in_small_files(engine: Engine, recipe: Recipe, outcome: Outcome) -> None:
    """Export once completely, and once with a full disk for the last rank's file."""
    write_file, tokenizer = files.write_file, load_tokenizer(recipe.model.path)
    max_file_bytes = MAX_FILE_BYTES[recipe.model.precision]

    def record(path, tensors, expected):
        outcome.written.append(path.name)
        outcome.held_bytes = max(outcome.held_bytes, sum(tensor.nbytes for tensor in tensors.values()))
        write_file(path, tensors, expected)

    def fail(path, tensors, expected):
        if layout.rank("shards") == layout.size("shards") - 1:
            raise OSError(28, "No space left on device")
        write_file(path, tensors, expected)

    with pytest.MonkeyPatch.context() as patched:
        for name, write in (("small", record), ("failed", fail)):
            patched.setattr(files, "write_file", write)
            try:
                save_hugging_face(
                    engine, tokenizer, recipe.model.path, outcome.folder / name, max_file_bytes=max_file_bytes
                )
            except ExportFailed as error:
                outcome.failure = f"{name}: {error}"


def train(folder: Path, name: str) -> Outcome:
    """Train as the command does, and inspect the engine before it is closed."""
    recipe = make_recipe(folder, name, **CASES[name])
    outcomes = []

    def inspect(engine: Engine) -> None:
        outcome = Outcome(Path(recipe.run.output_dir), compute_engine_logits(engine))
        if recipe.lora is None:
            export_in_small_files(engine, recipe, outcome)
        outcomes.append(outcome)

    with resumed_runs.inspecting_engines(inspect):
        run.train(recipe)
    return outcomes[0]


def train_all(folder: Path) -> dict[str, Outcome]:
    return {name: train(folder, name) for name in CASES}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """Outcomes of all runs, by rank."""
    folder = tmp_path_factory.mktemp("export")
    tokenizer = make_tokenizer()
    for kind, tied in (("tied", True), ("untied", False)):
        # Sizes that 2 ranks do not divide: shards with padding.
        model = tiny.qwen3(tied=tied, vocab_size=len(tokenizer), hidden_size=33, head_dim=6)
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
        (folder / kind / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    write_moe_model(folder / "moe_model", "deepseek_v3", torch.bfloat16)
    (folder / "moe_model" / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    write_conversations(folder / "train.jsonl", sums(range(12)))
    write_conversations(folder / "held_out.jsonl", sums(range(12, 16)))
    for precision in ("fp32", "bf16"):
        write_deepspeed_config(folder / f"{precision}.json", bf16=precision == "bf16")
    return run_ranks(train_all, 2, folder)


def compute_logits(model) -> Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


def load_base(name: str, folder: Path, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(folder.parent / CASES[name]["base"], dtype=dtype)


def find_largest_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max())


TOLERANCE = {"fp32": 1e-5, "bf16": 0.02}
"""In bf16 logits of this size have an ulp of 0.004 to 0.016; the weights themselves are compared bit for bit."""


@pytest.mark.parametrize("name", FULL)
def test_an_exported_model_computes_what_the_engine_computed(outcomes, name):
    outcome, precision = outcomes[0][name], CASES[name]["precision"]
    untrained = compute_logits(load_base(name, outcome.folder, torch.float32))
    assert find_largest_difference(untrained, outcome.logits) > 0.1
    for folder in ("model", "small"):
        model = AutoModelForCausalLM.from_pretrained(outcome.folder / folder)
        assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        difference = find_largest_difference(compute_logits(model), outcome.logits)
        print(f"{folder}: {difference:.1e} of {float(outcome.logits.abs().max()):.2f}")
        assert difference < TOLERANCE[precision]


@pytest.mark.parametrize("name", FULL)
def test_small_files_are_written_by_both_ranks_and_hold_the_same_weights(outcomes, name):
    folder, max_file_bytes = outcomes[0][name].folder, MAX_FILE_BYTES[CASES[name]["precision"]]
    names = sorted(path.name for path in (folder / "small").glob("*.safetensors"))
    assert [result[name].written for result in outcomes] == [names[0::2], names[1::2]]
    assert len(names) >= 4
    held_bytes = max(result[name].held_bytes for result in outcomes)
    assert held_bytes <= 1.2 * max_file_bytes  # the embedding exceeds the limit and has a file to itself
    one_file, small = load_tensors(folder / "model"), load_tensors(folder / "small")
    assert one_file.keys() == small.keys()
    assert all(torch.equal(one_file[key], small[key]) for key in one_file)
    assert one_file.keys() == load_tensors(folder.parent / CASES[name]["base"]).keys()
    index = json.loads((folder / "small" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one_file.keys()
    assert ("lm_head.weight" in one_file) is not (CASES[name]["base"] == "tied")


@pytest.mark.parametrize("name", FULL)
def test_the_export_of_a_checkpoint_has_the_same_bytes(outcomes, name):
    folder = outcomes[0][name].folder
    exported = export_run(folder)
    assert exported.parent.name == f"step_{NUM_STEPS:08d}"
    live, later = load_tensors(folder / "model"), load_tensors(exported)
    assert live.keys() == later.keys()
    assert all(torch.equal(live[key], later[key]) for key in live)
    for file in {path.name for path in (folder / "model").iterdir()} - {"model.safetensors", "README.md"}:
        assert (exported / file).read_bytes() == (folder / "model" / file).read_bytes(), file
    # The card of an export also has the digest of its checkpoint.
    lines = [(at / "README.md").read_text().splitlines() for at in (exported, folder / "model")]
    added = [line for line in lines[0] if line not in lines[1]]
    assert len(added) == 1 and added[0].startswith("checkpoint: ")
    assert [line for line in lines[0] if line not in added] == lines[1]


@pytest.mark.parametrize("name", FULL)
def test_a_rank_that_cannot_write_ends_the_export_on_all_ranks(outcomes, name):
    for result in outcomes:
        assert result[name].failure.startswith("failed: ") and "rank 1 on host" in result[name].failure
        assert "No space left on device" in result[name].failure
        assert "vcore-ds export" in result[name].failure
        assert not list(result[name].folder.glob("failed*"))


@pytest.mark.parametrize("name", CASES)
def test_tokenizer_and_generation_settings_are_exported_with_the_weights(outcomes, name):
    folder = outcomes[0][name].folder / ("adapter" if "lora" in CASES[name] else "model")
    start = (folder.parent / "start.txt").read_text()
    assert ("2 of 4 experts for a token, no auxiliary loss" in start) is (CASES[name]["base"] == "moe_model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHATML
    if "lora" not in CASES[name]:
        end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
        expected = {"do_sample": False, "temperature": 0.6, "eos_token_id": [end_of_turn]}
        assert json.loads((folder / "generation_config.json").read_text()) == expected
        assert "End of turn:  <|im_end|>, added" in start
        base = json.loads((folder.parent.parent / "untied" / "config.json").read_text())
        assert json.loads((folder / "config.json").read_text())["use_cache"] == base["use_cache"]
    assert not list(folder.parent.glob("*.unfinished"))


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_computes_what_the_engine_computed(outcomes, name):
    outcome, precision = outcomes[0][name], CASES[name]["precision"]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    untrained = compute_logits(load_base(name, outcome.folder, torch.float32))
    assert find_largest_difference(untrained, outcome.logits) > 0.02
    from_checkpoint = export_run(outcome.folder)
    live, later = load_tensors(outcome.folder / "adapter"), load_tensors(from_checkpoint)
    assert live.keys() == later.keys()
    assert all(torch.equal(live[key].float(), later[key]) for key in live)
    for folder in (outcome.folder / "adapter", from_checkpoint):
        adapted = PeftModel.from_pretrained(load_base(name, outcome.folder, dtype), folder)
        difference = find_largest_difference(compute_logits(adapted), outcome.logits)
        print(f"{folder.name}: {difference:.1e} of {float(outcome.logits.abs().max()):.2f}")
        assert difference < TOLERANCE[precision]


@pytest.mark.parametrize("name", ADAPTED)
def test_a_merged_adapter_computes_what_the_engine_computed(outcomes, name):
    outcome, precision = outcomes[0][name], CASES[name]["precision"]
    merged = export_run(outcome.folder, merge=True)
    model = AutoModelForCausalLM.from_pretrained(merged)
    difference = find_largest_difference(compute_logits(model), outcome.logits)
    print(f"{difference:.1e} of {float(outcome.logits.abs().max()):.2f}")
    assert difference < TOLERANCE[precision]
    shutil.rmtree(outcome.folder / "checkpoints")
    from_adapter = export_run(outcome.folder, merge=True)
    assert from_adapter == outcome.folder / "export" / "adapter" / "merged"
    from_adapter = load_tensors(from_adapter)
    assert all(torch.equal(from_adapter[key], tensor) for key, tensor in load_tensors(merged).items())
