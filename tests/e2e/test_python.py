"""The Python API as a user calls it: the lines of docs/python.md print what the page shows; `score` and `train`."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY, command_environment
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup, prepare_pretrained_model, sums, write_conversations, write_model

pytestmark = pytest.mark.e2e

PAGE = REPOSITORY / "docs" / "python.md"


def test_the_twenty_lines_print_what_the_page_shows(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```\n\nprints", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = re.findall(r"prints\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "HuggingFaceTB").mkdir()
    model = prepare_pretrained_model()
    (tmp_path / "HuggingFaceTB" / model.name).symlink_to(model)
    with ForkedJob(run_code, [code, str(tmp_path)], tmp_path / "log") as job:
        assert job.wait() == 0, job.output
    print(job.output)
    row = re.compile(r"^('.*?') +utility +(\S+) +weight +(\S+)$", re.MULTILINE)
    printed, expected = row.findall(job.output), row.findall(shown)
    assert [token for token, _, _ in printed] == [token for token, _, _ in expected] and len(expected) == 13
    for (_, *numbers), (_, *expected_numbers) in zip(printed, expected, strict=True):
        # The kernels of another machine round differently.
        assert [float(x) for x in numbers] == pytest.approx([float(x) for x in expected_numbers], rel=1e-3, abs=2e-2)
    assert float(printed[-2][1]) < -10  # the wrong digit


def run_code(arguments: Sequence[str]) -> int:
    """Run code with a variable `folder`, without the environment variables of a launcher. The code of the page runs in
    that folder, the scripts in the repository."""
    code, folder = arguments
    plain = {name: value for name, value in command_environment().items() if not name.startswith("TORCHELASTIC_")}
    os.environ.clear()
    os.environ.update(plain)
    if code not in (SCRIPT, LOOPS):
        os.chdir(folder)
    exec(code, {"folder": folder})
    return 0


SCRIPT = """
import os

import pyarrow.parquet as pq
import torch
import vcore_ds
from transformers import AutoModelForCausalLM
from vcore_ds.commands.cli import main

recipe = dict(
    model={"path": f"{folder}/model", "precision": "fp32"}, lora=None, probe={"direction": "sgd"},
    data={"train_path": f"{folder}/train.jsonl", "validation_path": None, "cache_dir": f"{folder}/cache"},
    batch={"global_size": 6}, schedule={"num_steps": 2, "kind": "constant", "warmup_ratio": 0.0},
    optimizer={"name": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "gradient_clipping": None},
    method={"normalization": "token"}, run={"output_dir": f"{folder}/run"},
    engine={"deepspeed_config": "ds_configs/zero3_fp32.json"},
)
trusted = {"data": {**recipe["data"], "probe_path": f"{folder}/trusted.jsonl"}}
process = dict(os.environ), torch.get_rng_state()
scores = vcore_ds.score("quickstart.yaml", output=f"{folder}/scores", all_tokens=True, **{**recipe, **trusted})
again = vcore_ds.score("quickstart.yaml", output=f"{folder}/trusted", all_tokens=True,
                       **{**recipe, "data": {**trusted["data"], "train_path": f"{folder}/trusted.jsonl"}})
weights = f"{folder}/weights.parquet"
assert main(["keep", str(scores), "--weights", "kl_budget=0.05", "--output", weights]) == 0

def make_batch(row):
    labels = [token if marked else -100 for token, marked in zip(row["input_ids"], row["supervised"])]
    return {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([labels])}

model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
rows = pq.read_table(scores / "utilities.parquet").to_pylist()
probe = vcore_ds.probe_direction(
    model, [make_batch(row) for row in pq.read_table(again / "utilities.parquet").to_pylist()], normalization="token"
)
for row in rows:
    utilities = vcore_ds.token_utilities(model, make_batch(row), probe)[0][row["supervised"]]
    torch.testing.assert_close(torch.tensor(row["utilities.trusted"]), utilities, rtol=5e-4, atol=1e-5)
print(f"{len(rows)} traces: utilities of the command and of the function agree")

stored = vcore_ds.train("quickstart.yaml", "methods/stored.yaml",
                        **{**recipe, "data": {**recipe["data"], "token_weights": weights}})
total = number = 0.0
for row in pq.read_table(weights).to_pylist():
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    logits = model(ids).logits[:, :-1].transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
    total += float((losses * torch.tensor([row["loss_weights"]]).float()[:, 1:]).sum())
    number += int((labels[:, 1:] != -100).sum())
print("weighted loss", total / number)
print("result", stored.export_folder.is_dir())
vcore_ds.token_utilities(model, make_batch(rows[0]), probe)  # the run's process group has ended
assert torch.equal(process[1], torch.get_rng_state())
changed = {name for name in {*process[0], *os.environ} if process[0].get(name) != os.environ.get(name)}
assert not changed & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}, changed
try:
    vcore_ds.train("quickstart.yaml", **{**recipe, "method": {"kl_budgt": 1}})
except vcore_ds.UserError as error:
    print("refused", error)
"""


def test_score_and_train_agree_with_the_functions_and_plain_transformers(tmp_path: Path) -> None:
    """Scores of all tokens equal `token_utilities`, and a run with stored weights has the weighted loss of plain
    transformers, all in one process."""
    write_model(tmp_path / "model")
    write_conversations(tmp_path / "train.jsonl", sums(range(6)))
    write_conversations(tmp_path / "trusted.jsonl", sums(range(20, 23)))
    with ForkedJob(run_code, [SCRIPT, str(tmp_path)], tmp_path / "log") as job:
        assert job.wait() == 0, job.output
    assert "6 traces: utilities of the command and of the function agree" in job.output
    assert "result True" in job.output and "refused " in job.output and "method.kl_budgt" in job.output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (expected,) = re.findall(r"^weighted loss (\S+)$", job.output, re.MULTILINE)
    print(f"run {steps[0]['weighted_loss']}, plain transformers {expected}, uniform {steps[0]['loss']}")
    assert steps[0]["weighted_loss"] == pytest.approx(float(expected), abs=1e-5)
    assert abs(steps[0]["weighted_loss"] - steps[0]["loss"]) > 1e-4 and len(steps) == 2


LOOPS = """
import json

import pyarrow.parquet as pq
import torch
import vcore_ds
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

NUM_STEPS, RATE = 3, 1e-3
data = {"train_path": f"{folder}/train.jsonl", "validation_path": None, "cache_dir": f"{folder}/cache",
        "probe_path": f"{folder}/trusted.jsonl"}
recipe = dict(
    model={"path": f"{folder}/model", "precision": "fp32"}, lora=None, probe={"batch_size": "all"}, data=data,
    batch={"global_size": 6}, schedule={"num_steps": NUM_STEPS, "kind": "constant", "warmup_ratio": 0.0},
    optimizer={"learning_rate": RATE, "weight_decay": 0.0}, run={"num_token_records": 0, "num_followed_traces": 0},
    engine={"deepspeed_config": "ds_configs/zero3_fp32.json"},
)

def read_rows(name):
    output = f"{folder}/{name}_rows"
    sections = {**recipe, "data": {**data, "train_path": f"{folder}/{name}.jsonl"}}
    vcore_ds.score("quickstart.yaml", output=output, all_tokens=True, **sections)
    rows = pq.read_table(f"{output}/utilities.parquet").to_pylist()
    marked = [[t if s else -100 for t, s in zip(row["input_ids"], row["supervised"])] for row in rows]
    return [
        {"input_ids": torch.tensor(row["input_ids"]), "labels": torch.tensor(labels)}
        for row, labels in zip(rows, marked)
    ]

def collate(rows):
    fields = {"input_ids": 0, "labels": -100}
    batch = {
        key: pad_sequence([row[key] for row in rows], batch_first=True, padding_value=value)
        for key, value in fields.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return {**batch, "attention_mask": (torch.arange(batch["labels"].shape[1]) < lengths[:, None]).long()}

def load():
    return AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)

rows, trusted = read_rows("train"), [collate(read_rows("trusted"))]
recipe["run"]["output_dir"] = f"{folder}/run"
vcore_ds.train("quickstart.yaml", **recipe)
expected = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]

model, vcore, metrics = load(), vcore_ds.VcoreLoss(trusted), []
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
for _ in range(NUM_STEPS):
    loss = vcore(model, collate(rows), optimizer)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    direction = torch.stack([v.square().sum() for v in vcore.direction.gradient.values()]).sum().sqrt()
    values = dict(loss=vcore.uniform_loss, alpha=vcore.alpha, grad_norm=norm, probe_loss=vcore.direction.loss,
                  probe_grad_norm=vcore.direction.gradient_norm, direction_norm=direction)
    metrics.append({key: float(value) for key, value in values.items()})
    optimizer.step()
    optimizer.zero_grad()
for step, (ours, of_run) in enumerate(zip(metrics, expected, strict=True), 1):
    largest = max(abs(ours[key] - of_run[key]) / abs(of_run[key]) for key in ours)
    print("difference", step, largest)

class VcoreTrainer(Trainer):
    loss_is_scaled_for_ga = False  # a mean over the batch, which the Trainer divides by the accumulation steps

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert model.training
        return vcore(model, inputs, self.optimizer)

def train_with_trainer(**arguments):
    global vcore
    vcore, model = vcore_ds.VcoreLoss(trusted), load()
    arguments = TrainingArguments(
        f"{folder}/trainer", max_steps=NUM_STEPS, learning_rate=RATE, lr_scheduler_type="constant", save_strategy="no",
        report_to="none", optim="adamw_torch", max_grad_norm=1.0, use_cpu=True, **arguments,
    )
    VcoreTrainer(model, arguments, collate, rows).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

plain = torch.cat([p.detach().flatten() for p in model.parameters()])
change = (plain - torch.cat([p.detach().flatten() for p in load().parameters()])).norm()
whole = train_with_trainer(per_device_train_batch_size=6)
parts = train_with_trainer(per_device_train_batch_size=3, gradient_accumulation_steps=2)
print("trainer", float((whole - plain).norm() / change), float((parts - plain).norm() / change))
rounded = train_with_trainer(per_device_train_batch_size=6, bf16=True)
print("autocast", float((rounded - plain).norm() / change))
"""


def test_a_loop_and_a_trainer_take_the_steps_of_a_run(tmp_path: Path) -> None:
    """`VcoreLoss` with AdamW, whose direction changes from the second step on."""
    write_model(tmp_path / "model")
    write_conversations(tmp_path / "train.jsonl", sums(range(6)))
    write_conversations(tmp_path / "trusted.jsonl", sums(range(20, 23)))
    with ForkedJob(run_code, [LOOPS, str(tmp_path)], tmp_path / "log") as job:
        assert job.wait() == 0, job.output
    print(job.output)
    differences = re.findall(r"^difference \d (\S+)", job.output, re.MULTILINE)
    assert len(differences) == 3 and all(float(difference) < 1e-5 for difference in differences)
    ((whole, parts),) = re.findall(r"^trainer (\S+) (\S+)$", job.output, re.MULTILINE)
    assert float(whole) < 1e-5
    assert float(parts) < 1e-3, "alpha is that of a part there"
    (rounded,) = re.findall(r"^autocast (\S+)$", job.output, re.MULTILINE)
    assert float(rounded) < 0.1


REPEATED_CALLS = """
import sys

import torch
import vcore_ds

sets = {"train_path": f"{folder}/train.jsonl", "validation_path": None, "cache_dir": f"{folder}/cache"}
trusted = {**sets, "probe_path": f"{folder}/validation.jsonl"}
recipe = dict(
    model={"path": f"{folder}/untied", "precision": "fp32"}, lora=None, probe={"batch_size": 2},
    batch={"global_size": 4}, schedule={"num_steps": 1}, engine={"deepspeed_config": "ds_configs/zero3_fp32.json"},
)


def train(data, name):
    run = {"output_dir": f"{output}/{name}", "num_followed_traces": 0}
    return vcore_ds.train("quickstart.yaml", **recipe, data=data, run=run).last_step.values


first = train(sets, "first")
try:
    train({**sets, "probe_path": f"{folder}/untied/config.json"}, "refused")
except vcore_ds.UserError as error:
    sys.stderr.write(f"refused {error}\\n")
assert train(sets, "second")["loss"] == first["loss"]
vcore_ds.score("quickstart.yaml", output=f"{output}/scores", **recipe, data=trusted)
assert not torch.distributed.is_initialized()
"""


def run_launched_code(arguments: Sequence[str]) -> int:
    folder, output = arguments
    exec(REPEATED_CALLS, {"folder": folder, "output": output})
    return 0


@pytest.mark.parametrize("rank_0_serves_store", [False, True], ids=["torchrun", "plain variables"])
def test_a_launched_script_trains_twice_and_scores(setup: TinySetup, tmp_path: Path, rank_0_serves_store: bool) -> None:
    """The second process group of a job meets at the same store as the first, and must not read its keys."""
    arguments = [str(setup.train.parent), str(tmp_path)]
    with ForkedJob(
        run_launched_code, arguments, tmp_path / "log", num_ranks=2, rank_0_serves_store=rank_0_serves_store
    ) as job:
        assert job.wait() == 0, job.output
    assert job.output.count("refused ") == 2 and (tmp_path / "scores" / "scores.json").is_file()
