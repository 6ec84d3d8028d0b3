"""With TRL: two steps of GRPO from a real adapter, whose rewards differ and whose gradient is not zero; SFT with VCORE.

The adapter is trained here, on the quickstart's model, to box the answers of short sums; it is right sometimes. TRL
is not among this project's packages (docs/export.md):
VCORE_DS_TRL_PYTHON=VENV/bin/python python -m pytest tests/rl/test_trl.py -s
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

TRL = os.environ.get("VCORE_DS_TRL_PYTHON")
pytestmark = pytest.mark.skipif(
    TRL is None, reason="NOT CHECKED: TRL. Name a Python that has trl 1.16.0 in VCORE_DS_TRL_PYTHON"
)

EXAMPLES = REPOSITORY / "launch_scripts" / "rl"
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


def test_sft_with_vcore_takes_the_first_step_of_a_run(tmp_path: Path) -> None:
    # TRL learns all that follows the prompt, a run nothing beyond the end of the turn: no line break there.
    write_model(tmp_path / "model", chat_template=CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    for name, numbers in (("train", range(6)), ("trusted", range(20, 23))):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for question, answer in sums(numbers):
                prompt, completion = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
                file.write(json.dumps({"prompt": [prompt], "completion": [completion]}) + "\n")
    changes = f"model.path={tmp_path}/model model.precision=fp32 lora=null data.train_path={tmp_path}/train.jsonl"
    changes += f" data.probe_path={tmp_path}/trusted.jsonl probe.batch_size=all data.validation_path=null"
    changes += (
        f" data.cache_dir={tmp_path}/cache schedule.num_steps=1 batch.global_size=6 run.output_dir={tmp_path}/run"
    )
    changes += " engine.deepspeed_config=ds_configs/zero3_fp32.json"
    done = run_command(f"vcore-ds train quickstart.yaml {changes}")
    assert done.returncode == 0, done.stdout
    expected = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    options = f"--model_name_or_path {tmp_path}/model --train {tmp_path}/train.jsonl --trusted {tmp_path}/trusted.jsonl"
    options += " --max_steps 1 --logging_steps 1 --report_to none --use_cpu true --bf16 false --dtype float32"
    script = REPOSITORY / "launch_scripts" / "trl" / "sft_vcore.py"
    options += " --gradient_checkpointing false --per_device_train_batch_size"
    zero3 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    zero3 |= {"gradient_clipping": "auto"}
    zero3 |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    (tmp_path / "zero3.json").write_text(json.dumps(zero3))
    # DeepSpeed would compile its collectives for shared memory for minutes.
    (tmp_path / "start.py").write_text(
        "import runpy, deepspeed\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    launch = "-m accelerate.commands.accelerate_cli launch --use_deepspeed --num_processes 2 --num_machines 1"
    launch += f" --mixed_precision no --dynamo_backend no --main_process_port 0 {tmp_path}/start.py"
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    commands = (
        f"{script} {options} 6 --output_dir {tmp_path}/trl",
        f"{launch} {options} 3 --output_dir {tmp_path}/zero3",
    )
    for command in (commands[0], f"{commands[1]} --deepspeed {tmp_path}/zero3.json"):
        trained = subprocess.run(
            [str(TRL), *command.split()], capture_output=True, text=True, env=environment, timeout=600
        )
        assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-6000:]
    for folder in ("trl", "zero3"):
        step = json.loads((tmp_path / folder / "trainer_state.json").read_text())["log_history"][0]
        values = {"uniform_loss": "loss", "alpha": "alpha", "grad_norm": "grad_norm"}
        print(folder, {ours: (step[ours], expected[theirs]) for ours, theirs in values.items()})
        for ours, theirs in values.items():
            assert step[ours] == pytest.approx(expected[theirs], rel=1e-5)
