"""Every method on the quickstart's model, and iw-SFT with all parameters trained, from the command that prepares it."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.commands import read_metrics, run_command
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import TinySetup
from vcore_ds.commands.quickstart.session import RECIPE
from vcore_ds.commands.quickstart.traces import prepare_quickstart_data
from vcore_ds.config import load_recipe

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]
FRAGMENTS = {name: f"methods/{name}.yaml" for name in ("sft", "dft", "iw_sft", "random")}


def train_all(overrides: list[str], folder: str) -> None:
    """In one process, one after the other: starting costs more than a step."""
    from vcore_ds.run import train

    for name, fragment in {"vcore": None, **FRAGMENTS}.items():
        words = [*overrides, *([fragment] if fragment else []), f"run.output_dir={folder}/{name}"]
        train(load_recipe(RECIPE, words))


@pytest.fixture(scope="module")
def lines_by_method(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("methods")
    model, training, *_ = prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data")
    overrides = [f"model.path={model}", f"data.train_path={training}", "data.validation_path=null"]
    overrides += ["batch.global_size=2", "batch.micro_batch_size_per_rank=2", "schedule.num_steps=2"]
    overrides += ["probe.batch_size=1", "data.cutoff_length=192"]
    run_ranks(train_all, 1, overrides, str(folder))
    return {name: read_metrics(folder / name) for name in ("vcore", *FRAGMENTS)}


def test_loss_is_the_same_quantity_whatever_the_method(lines_by_method) -> None:
    firsts = {name: lines[0] for name, lines in lines_by_method.items()}
    print({name: (first["loss"], first["weighted_loss"], first["total_weight"]) for name, first in firsts.items()})
    # The same sequences under the same parameters, so the same number, while what is trained on differs. LoRA dropout
    # is off in this recipe.
    assert {first["loss"] for first in firsts.values()} == {firsts["sft"]["loss"]}
    assert firsts["sft"]["weighted_loss"] == pytest.approx(firsts["sft"]["loss"], rel=1e-6)
    for name in ("dft", "random", "vcore"):
        assert firsts[name]["weighted_loss"] != pytest.approx(firsts[name]["loss"], rel=1e-3), name
    assert firsts["dft"]["total_weight"] < 0.9
    # Not what rounding leaves of a ratio: these methods have no alpha.
    baselines = [lines for name, lines in lines_by_method.items() if name != "vcore"]
    assert {line["alpha"] for lines in baselines for line in lines} == {1.0}
    # Adapters start where the reference is.
    assert firsts["iw_sft"]["total_weight"] == pytest.approx(1.0, abs=1e-3)


def test_the_second_steps_differ(lines_by_method) -> None:
    assert len({lines[1]["grad_norm"] for lines in lines_by_method.values()}) == len(lines_by_method)
    assert lines_by_method["iw_sft"][1]["total_weight"] != pytest.approx(1.0, abs=1e-6)
    for name, lines in lines_by_method.items():
        keys = [line[key] is None for line in lines for key in ("tau", "kl", "utility_mean", "probe_loss")]
        assert keys == [name != "vcore"] * 8


@dataclass(frozen=True)
class Reference:
    file: Path
    output: str


RECIPE_32B = "launch_scripts/recipes/qwen3_32b_math_full.yaml"


@pytest.fixture(scope="module")
def reference(setup: TinySetup, tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    words = " ".join(setup.overrides(folder / "unused"))
    launcher = "torchrun --nproc_per_node 2 --no-python vcore-ds"
    done = run_command(f"{launcher} reference {RECIPE_32B} {words} --output {folder}/reference.npz")
    assert done.returncode == 0, done.stdout
    return Reference(folder / "reference.npz", done.stdout)


def test_the_reference_holds_every_sequences_log_probability(reference: Reference, setup: TinySetup) -> None:
    """Against the plain Hugging Face model, one conversation after the other."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(setup.untied, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(setup.untied)
    expected = []
    for line in setup.train.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
        ids = tokenizer(whole, return_tensors="pt")["input_ids"]
        start = len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        expected.append(float(log_p.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    with np.load(reference.file) as stored:
        assert stored["log_probability"].shape == (12,)
        np.testing.assert_allclose(stored["log_probability"], expected, rtol=1e-5)
    assert "12 of 12 sequences" in reference.output


def test_iw_sft_with_all_parameters_starts_at_plain_sft(reference: Reference, setup: TinySetup, tmp_path) -> None:
    words = setup.overrides(
        tmp_path / "run", "methods/iw_sft.yaml", f"data.reference_log_probabilities={reference.file}"
    )
    done = run_command(f"vcore-ds train {RECIPE_32B} {' '.join(words)}")
    assert done.returncode == 0, done.stdout
    first, second = read_metrics(tmp_path / "run")
    assert first["total_weight"] == pytest.approx(1.0, abs=1e-4)
    assert first["weighted_loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert second["total_weight"] > 1.001  # the model has learned, so its sequences are likelier than before


def test_a_reference_is_not_overwritten_nor_made_for_adapters(reference: Reference, setup: TinySetup, tmp_path) -> None:
    words = " ".join(setup.overrides(tmp_path / "run"))
    again = run_command(f"vcore-ds reference {RECIPE_32B} {words} --output {reference.file}")
    assert again.returncode == 2 and "found a file already" in again.stdout
    lora = RECIPE_32B.replace("full", "lora")
    refused = run_command(f"vcore-ds reference {lora} {words} --output {tmp_path}/reference.npz")
    assert refused.returncode == 2 and "without its adapters" in refused.stdout
    assert "Traceback" not in again.stdout + refused.stdout
