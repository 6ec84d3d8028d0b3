"""With TRL: two steps of GRPO from a real adapter, whose rewards differ and whose gradient is not zero; SFT with VCORE,
in LLaMA-Factory too.

The adapter is trained here, on the quickstart's model, to box the answers of short sums; it is right sometimes. Neither
is among this project's packages (docs/export.md), and LLaMA-Factory wants another TRL than 1.16:
VCORE_DS_TRL_PYTHON=A/bin/python VCORE_DS_LLAMAFACTORY_PYTHON=B/bin/python python -m pytest tests/rl/test_trl.py -s
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch_scripts.quickstart import DATA
from launch_scripts.quickstart_data import prepare_quickstart_data
from tests.helpers.commands import REPOSITORY, run_command
from tests.helpers.setups import sums, write_model
from tests.helpers.tokenizer import CHATML
from vcore_ds.data.answers import math_prompt

TRL, LLAMAFACTORY = (os.environ.get(f"VCORE_DS_{name}_PYTHON") for name in ("TRL", "LLAMAFACTORY"))
NEEDS_TRL = pytest.mark.skipif(
    TRL is None, reason="NOT CHECKED: TRL. Name a Python that has trl 1.16.0 in VCORE_DS_TRL_PYTHON"
)
NEEDS_LLAMAFACTORY = pytest.mark.skipif(
    LLAMAFACTORY is None,
    reason="NOT CHECKED: LLaMA-Factory. Name a Python that has llamafactory 0.9.5 in VCORE_DS_LLAMAFACTORY_PYTHON",
)

EXAMPLES = REPOSITORY / "launch_scripts" / "rl"
QUANTITIES = {"uniform_loss": "loss", "alpha": "alpha", "grad_norm": "grad_norm"}
"""Names in the script's log, and in a run's."""
SUMS = [(a, b) for a in range(2, 12) for b in range(2, 12)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished LoRA run of the quickstart's model on sums."""
    folder, model = tmp_path_factory.mktemp("sums"), prepare_quickstart_data(DATA).model
    # In fp32, since plain PyTorch takes minutes for a step in bf16 on a CPU without bf16 instructions.
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    with (folder / "train.jsonl").open("w") as file:
        for a, b in SUMS[::2]:
            question, answer = math_prompt(f"What is {a} + {b}?"), f"\\boxed{{{a + b}}}"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    changes = f"model.path={folder}/model data.train_path={folder}/train.jsonl data.validation_path=null"
    changes += f" data.cache_dir={folder}/cache schedule.num_steps=8 batch.global_size=10 run.output_dir={folder}/run"
    done = run_command(f"vcore-ds train quickstart.yaml methods/sft.yaml {changes}")
    assert done.returncode == 0, done.stdout
    return folder / "run"


@pytest.fixture(scope="module")
def problems(run: Path) -> Path:
    rows = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS]
    source = run.parent / "problems.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [source, "--output", run.parent / "rl_data", "--held-out", "4"]
    subprocess.run([sys.executable, EXAMPLES / "problems.py", *words], check=True)
    return run.parent / "rl_data" / "train.parquet"


@NEEDS_TRL
def test_grpo_continues_from_the_adapter(run: Path, problems: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    adapter, output = run / "adapter", tmp_path / "result"
    words = [
        *(
            str(EXAMPLES / "grpo_trl.py"),
            str(adapter),
            str(problems),
            "--output_dir",
            str(output),
            "--epsilon_high",
            "0.28",
        ),
        *("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2", "--generation_batch_size", "16"),
        *("--max_steps", "2", "--max_completion_length", "16", "--warmup_steps", "0"),
        *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to", "none"),
    ]
    done = subprocess.run([str(TRL), *words], capture_output=True, text=True, env=environment, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps = [
        line for line in json.loads((output / "trainer_state.json").read_text())["log_history"] if "reward" in line
    ]
    for step in steps:
        print({key: step[key] for key in ("reward", "reward_std", "frac_reward_zero_std", "grad_norm", "kl")})
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["reward"] < 1 and step["reward_std"] > 0 and step["frac_reward_zero_std"] < 1
        assert step["grad_norm"] > 0
    # The reference of the KL term is this adapter, not the base model: nothing has moved before the first update.
    assert abs(steps[0]["kl"]) < 1e-3
    before, after = (load_file(place / "adapter_model.safetensors") for place in (adapter, output))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)


@pytest.mark.parametrize(
    "name", [pytest.param("trl", marks=NEEDS_TRL), pytest.param("llamafactory", marks=NEEDS_LLAMAFACTORY)]
)
def test_sft_with_vcore_takes_the_first_step_of_a_run(name: str, tmp_path: Path) -> None:
    # Other trainers learn all that follows the prompt, a run nothing beyond the end of the turn: no line break there.
    write_model(tmp_path / "model", chat_template=CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    for file, numbers in (("train", range(6)), ("trusted", range(20, 23))):
        lines = []
        for question, answer in sums(numbers):
            prompt, completion = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
            lines.append({"prompt": [prompt], "completion": [completion]})
            if name == "llamafactory":
                lines[-1] = {"instruction": question, "input": "", "output": answer}
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {file: {"file_name": f"{file}.jsonl"} for file in ("train", "trusted")}
    (tmp_path / "dataset_info.json").write_text(json.dumps(files))
    changes = f"model.path={tmp_path}/model model.precision=fp32 lora=null data.train_path={tmp_path}/train.jsonl"
    changes += f" data.probe_path={tmp_path}/trusted.jsonl probe.batch_size=all data.validation_path=null"
    changes += (
        f" data.cache_dir={tmp_path}/cache schedule.num_steps=1 batch.global_size=6 run.output_dir={tmp_path}/run"
    )
    changes += " engine.deepspeed_config=ds_configs/zero3_fp32.json"
    done = run_command(f"vcore-ds train quickstart.yaml {changes}")
    assert done.returncode == 0, done.stdout
    expected = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    zero3 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    zero3 |= {"gradient_clipping": "auto"}
    zero3 |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    (tmp_path / "zero3.json").write_text(json.dumps(zero3))
    script = REPOSITORY / "launch_scripts" / name / "sft_vcore.py"
    # DeepSpeed would compile its collectives for shared memory for minutes.
    (tmp_path / "start.py").write_text(
        "import runpy, deepspeed\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    values = {"model_name_or_path": tmp_path / "model", "max_steps": 1, "logging_steps": 1, "report_to": "none"}
    values |= {"use_cpu": "true", "bf16": "false"}
    if name == "trl":
        values |= {"train": tmp_path / "train.jsonl", "trusted": tmp_path / "trusted.jsonl", "dtype": "float32"}
        values |= {"gradient_checkpointing": "false"}
        launch = "accelerate.commands.accelerate_cli launch --use_deepspeed --num_processes 2 --num_machines 1"
        launch += " --mixed_precision no --dynamo_backend no --main_process_port 0"
    else:
        values |= {"stage": "sft", "do_train": "true", "finetuning_type": "full", "infer_dtype": "float32"}
        values |= {"dataset_dir": tmp_path, "dataset": "train", "eval_dataset": "trusted"}
        values |= {"disable_gradient_checkpointing": "true", "gradient_checkpointing": "true"}  # transformers' own
        launch = "torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    for folder, command, changed in (
        ("one", f"{script}", {"per_device_train_batch_size": 6}),
        ("two", f"-m {launch} {tmp_path}/start.py", {"per_device_train_batch_size": 3, "deepspeed": "zero3.json"}),
    ):
        options = values | changed | {"output_dir": tmp_path / folder}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        if name == "llamafactory":
            (tmp_path / "sft.yaml").write_text("".join(f"{key}: {value}\n" for key, value in options.items()))
            words = ["sft.yaml"]
        trained = subprocess.run(
            [str(TRL if name == "trl" else LLAMAFACTORY), *command.split(), *words],
            capture_output=True, text=True, env=environment, timeout=600, cwd=tmp_path,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-6000:]
        step = json.loads((tmp_path / folder / "trainer_state.json").read_text())["log_history"][0]
        pairs = {ours: (step[ours], expected[theirs]) for ours, theirs in QUANTITIES.items()}
        print(name, folder, pairs)
        for measured, of_run in pairs.values():
            assert measured == pytest.approx(of_run, rel=1e-5)
