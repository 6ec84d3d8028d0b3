"""`vcore-ds plan`: every shipped recipe, what it prints, bad input, calibration; and what `check` says of a plan."""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from tests.helpers.commands import HANG_SECONDS
from tests.unit.test_recipes import RECIPES
from vcore_ds.commands.cli import main
from vcore_ds.commands.plan import prediction
from vcore_ds.commands.plan.columns import calibrate, change_method, choose_gpu, describe_validation, with_share
from vcore_ds.commands.plan.prediction import LengthModel, RunPlan, find_model, find_smallest_cluster, plan_run
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.sections import RunConfig
from vcore_ds.planning.hardware import GPUS, Achieved, Cluster
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.settings import derive_plan_settings

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_32b_math_full.yaml"
RECOMPUTES_ALL = "model.gradient_checkpointing=true"
LORA = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_4b_math_lora.yaml"
GIB = 2**30


def read_plan(capsys: pytest.CaptureFixture[str], *words: str, fits: bool = True) -> list[dict]:
    """The columns of a plan."""
    code = main(["plan", *words, "--json"])
    columns = json.loads(capsys.readouterr().out)
    assert code == (0 if fits else 2)
    return columns


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_plans(path: Path) -> None:
    recipe = load_recipe(path)
    shape, _ = find_model(recipe.model.path)
    plan = plan_run(derive_plan_settings(recipe), Cluster(GPUS["H200"], max(16, recipe.parallel.expert)), shape)
    assert plan.cost.seconds_step > 0
    smallest = find_smallest_cluster(plan)
    assert smallest is not None and smallest.fits_with_margin
    sft = plan_run(derive_plan_settings(change_method(recipe, "sft")), plan.cluster, shape)
    assert sft.cost.seconds_step < plan.cost.seconds_step
    assert sft.memory.estimate.persistent_bytes < plan.memory.estimate.persistent_bytes


def test_recipes_are_listed_as_fitting_where_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--gpus", "8", "--gpu", "h100"]) == 0
    heading, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert heading.split("  ")[0] == "recipe" and "on 8 H100" in heading
    verdicts = {name: cells[0] for name, *cells in (re.split(r"  +", row) for row in rows)}
    assert verdicts.keys() == {path.relative_to(RECIPE.parent).with_suffix("").as_posix() for path in RECIPES}
    assert {verdict.partition(";")[0] for verdict in verdicts.values()} == {"fits", "does not fit", "not on 8 GPUs"}
    for name in ("qwen3_4b_math_lora", "qwen3_32b_math_full", "qwen3_30b_a3b_math_full"):
        columns = read_plan(capsys, name, "--gpus", "8", fits=name == "qwen3_4b_math_lora")
        (plan,) = (column for column in columns if column["title"] == "vcore")
        expected = "fits" if plan["verdict"] == "fits" else f"does not fit; from {plan['fewest_gpus']} GPUs"
        assert verdicts[name] == expected
    assert verdicts["qwen3_235b_a22b_math_full"] == "not on 8 GPUs; from 96 GPUs"  # groups of 32, which share experts
    assert main(["recipes", "--gpu", "h100"]) == 2 and "expected the number of GPUs" in capsys.readouterr().err


def test_the_table_has_both_methods_and_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPE), RECOMPUTES_ALL, "--gpus", "32", "--gpu", "b200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("qwen3_32b_math_full.yaml on 32 B200 (4 nodes of 8)")
    verdict = [re.split(r"  +", line.strip()) for line in lines[1:5]]
    assert verdict[0] == [
        "verdict", "GiB of a GPU", "seconds of a step", "GPU hours of the run (100 steps)", "fewest GPUs"
    ]  # fmt: skip
    assert [row[:3] for row in verdict[1:]] == [
        ["sft", "fits", "27.7 of 178"],
        ["vcore", "fits", "33.1 of 178"],
        ["vcore probe.every=8", "fits", "33.1 of 178"],
    ]
    seconds = [[float(word) for word in re.findall(r"[0-9.]+", row[3])] for row in verdict[1:]]
    assert all(fast < likely < slow for likely, fast, slow in seconds)
    assert seconds[0][0] < seconds[2][0] < 0.8 * seconds[1][0]  # the probe is most of what VCORE adds
    assert [row[-1] for row in verdict[1:]] == ["4", "8", "8"]
    assert float(verdict[2][4]) == pytest.approx(seconds[1][0] * 3200 / 3600, abs=0.1)
    assert lines[6].startswith("Model: Qwen3-32B by its name: 32,762,123,264 parameters, 32,762,123,264 trained")
    text = "\n".join(lines)
    assert "matrix multiplications reach 76% of B200's 2,250 TFLOP/s (57% to 85% in the range)" in text
    assert "fused attention 330 TFLOP/s" in text


def test_plans_name_the_faster_deepspeed_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of Qwen3-32B has 487.6 million parameters. A prefetch of 50 million exposes the rest, of which 7/8 arrive
    from other nodes over eight adapters, in the forward and the backward of 64 layers."""
    words = [str(RECIPE), "methods/sft.yaml", "--gpus", "64"]
    small, large, hierarchical = (
        f"engine.deepspeed_config=ds_configs/zero3_bf16{x}.json" for x in ("", "_large", "_hierarchical")
    )
    plans = [one["seconds_step"] for one in read_plan(capsys, *words, "--compare", small, large)[1:]]
    exposed = 2 * 64 * (487.6e6 - 50e6) * 2 * 7 / 8 / 8 / (0.84 * 50e9)
    assert exposed == pytest.approx(0.29, abs=0.01) and plans[0] - plans[1] == pytest.approx(exposed, rel=0.05)
    assert main(["plan", *words, small]) == 0
    assert f"Faster: {large}, {plans[1]:.2f} instead of {plans[0]:.2f} s per step (sft)" in capsys.readouterr().out
    assert main(["plan", *words]) == 0 and "Faster" not in capsys.readouterr().out
    # On B200s the computation of a small batch hides less, and gathers within nodes pay.
    assert main(["plan", str(RECIPE), "--gpus", "64", "--gpu", "B200"]) == 0
    line = re.search(f"Faster: {hierarchical}, ([0-9.]+) instead of ([0-9.]+) s", capsys.readouterr().out)
    assert line is not None and float(line[1]) < 0.9 * float(line[2])
    assert main(["plan", str(RECIPE), "--gpus", "8", "--gpu", "B200"]) == 0
    assert hierarchical not in capsys.readouterr().out


def test_auto_recomputes_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "64", "--compare", "model.gradient_checkpointing=auto", RECOMPUTES_ALL]
    chosen, recomputed = read_plan(capsys, str(RECIPE), *words)[1:]
    assert chosen["verdict"] == recomputed["verdict"] == "fits"
    assert recomputed["memory_bytes"]["peak"] < chosen["memory_bytes"]["peak"] < 79 * 2**30
    # A recomputed forward is a quarter of a pass with a gradient.
    assert 0.75 < chosen["seconds_step"] / recomputed["seconds_step"] < 0.85
    assert main(["plan", str(RECIPE), "--gpus", "16"]) == 0
    line = re.search(r"Activation checkpoints: (\d+) of 64 layers recomputed", capsys.readouterr().out)
    assert line is not None and 0 < int(line[1]) < 64


def test_tensor_parallel_plans_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(RECIPE), "--gpus", "32", "--gpu", "B200", "--compare", "parts/layers/tensor8.yaml"]
    assert main(["plan", *words]) == 0
    batch = "Batch: 32 sequences a step on 4 tensor-parallel groups of 8 ranks, in packs of at most 65,536"
    assert capsys.readouterr().out.splitlines()[6].startswith(batch)
    alone, shared = read_plan(capsys, *words)
    assert shared["parameters"] == alone["parameters"] == 32_762_123_264
    received = shared["received_bytes"]
    assert received["parameters"]["inside"] == received["tensor-parallel activations"]["between"] == 0
    # A GPU has an eighth of the layers and all of the norms, and one gradient of two bytes in each of two passes.
    rank_parameters = (32_762_123_264 - 676_864) // 8 + 676_864
    assert received["gradients"]["between"] == pytest.approx(2 * 2 * rank_parameters * 3 / 4)
    assert received["gradients"]["between"] == pytest.approx(alone["received_bytes"]["gradients"]["between"], rel=1e-3)
    assert shared["seconds_step"] > alone["seconds_step"]


def test_memory_changes_of_tensor_parallel_plans_are_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(RECIPE), "parts/layers/tensor8.yaml", "--gpus", "8"]
    assert read_plan(capsys, *words, fits=False)[1]["memory_changes"]["16 ranks"]["fits"]
    assert read_plan(capsys, *words[:-1], "16")[1]["verdict"] != "does not fit"
    assert main(["plan", *words[:-1], "8", "--gpus-per-node", "4"]) == 2
    assert "parallel.tensor: found 8 with 4 ranks on a node; expected a divisor" in capsys.readouterr().err


def test_json_has_the_plan_in_bytes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    columns = read_plan(capsys, str(RECIPE), "--gpus", "64")
    vcore = columns[1]
    assert [column["title"] for column in columns] == ["sft", "vcore", "vcore probe.every=8"]
    assert vcore["memory_bytes"]["persistent"]["moments"] == 8 * -(-32_762_123_264 // 64)
    assert vcore["seconds_step"] == pytest.approx(sum(vcore["seconds"].values()))
    assert vcore["gpu_hours_per_100_steps"] == pytest.approx(100 * vcore["seconds_step"] * 64 / 3600)
    assert (vcore["fewest_gpus"], vcore["memory_changes"], vcore["gpu"]["name"]) == (16, {}, "H100")


def test_a_plan_that_does_not_fit_has_changes_that_make_it_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", str(RECIPE), "--gpus", "8", "engine.memory_check=false"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:4] == ["vcore", "does", "not", "fit"]
    assert main(["plan", str(RECIPE), "--gpus", "8"]) == 2
    text, error = capsys.readouterr()
    assert error.startswith(f"vcore-ds: memory: {RECIPE} does not fit on 8 H100: found 79.00 GiB")
    assert "\n  16 ranks: " in text
    vcore = read_plan(capsys, str(RECIPE), "--gpus", "8", fits=False)[1]
    enough = {words: change for words, change in vcore["memory_changes"].items() if change["fits"]}
    assert len(enough) == 3
    for words, change in enough.items():
        assert change["peak"] <= 79 * GIB < vcore["memory_bytes"]["peak"]
        again = ["--gpus", words.split()[0]] if words.endswith(" ranks") else ["--gpus", "8", *words.split()]
        assert read_plan(capsys, str(RECIPE), *again)[1]["verdict"] != "does not fit"
    monkeypatch.setattr(prediction, "MOST_GPUS", 32)  # the search for a cluster ends earlier
    tiny = read_plan(capsys, str(RECIPE), "--gpus", "8", "--gpu-memory", "1", fits=False)[1]
    assert not any(change["fits"] for change in tiny["memory_changes"].values()) and tiny["fewest_gpus"] is None


def test_settings_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model.gradient_checkpointing=false", "lora.rank=8 lora.alpha=16", "methods/sft.yaml"]
    columns = read_plan(capsys, str(RECIPE), RECOMPUTES_ALL, "--gpus", "16", "--compare", *settings)
    recipe, plain, lora, sft = columns
    assert [column["title"] for column in columns] == ["recipe", *settings]
    assert plain["memory_bytes"]["peak"] > recipe["memory_bytes"]["peak"] > lora["memory_bytes"]["peak"]
    assert plain["seconds"]["main"] < recipe["seconds"]["main"]
    assert sft["seconds"]["probe"] == 0 and lora["trained_parameters"] == 67_108_864


def test_a_local_model_is_counted_by_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Qwen3Config(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
        intermediate_size=192, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    counts = {
        read_plan(capsys, str(LORA), f"model.path={path}", "lora=null", "--gpus", "2")[0]["parameters"]
        for path in (tmp_path, tmp_path / "config.json")
    }
    # Query and output, key and value, the MLP; norms of the layer and of the heads; the last norm and the embedding.
    assert counts == {3 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 192 + 2 * 64 + 2 * 8) + 64 + 512 * 64}


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--gpu", "H1000"],
            "--gpu: found H1000; expected one of A100, H100, H100 PCIe, H100 NVL, H200, H200 NVL, B200, B300, GB200, "
            "RTX PRO 6000",
        ),
        (["--gpu", "H1000"], 'did you mean "H100"?'),
        (["model.path=Qwen/Qwen3-23B"], 'model.path: found Qwen/Qwen3-23B, which is not on this machine'),
        (["model.path=Qwen/Qwen3-23B"], 'did you mean "Qwen3-32B"?'),
        (["model.pth=x"], "model.pth"),
        (["batch.sequence_parallel=3"], "batch.sequence_parallel: found 3 on 16 ranks"),
        (["batch.global_size=5000"], "plan: found batch.global_size 5000 and probe.batch_size 32; expected at most"),
        (["--calibrate", "nowhere"], "nowhere"),
        (["--compare", "'a"], "--compare: found"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPE), "--gpus", "16", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus", "8", "--gpu-memory", "nan"], []])
def test_invalid_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(RECIPE), *words])
    assert ended.value.code == 2 and "vcore-ds plan: error: " in capsys.readouterr().err


def test_numbers_of_a_gpu_can_be_changed() -> None:
    options = dict(gpu="H100", gpu_memory=96.0, tflops=500.0, bandwidth=1.5, nvlink=None, nic=100.0)
    gpu = choose_gpu(argparse.Namespace(**options))
    assert (gpu.name, gpu.memory_bytes, gpu.flops) == ("H100 (changed)", 96 * GIB, 500e12)
    assert (gpu.memory_bandwidth, gpu.node_bandwidth, gpu.network_bandwidth) == (1.5e12, 450e9, 12.5e9)
    unchanged = {**dict.fromkeys(options), "gpu": "a100"}
    assert choose_gpu(argparse.Namespace(**unchanged)) == GPUS["A100"]


def test_plans_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from vcore_ds.commands.cli import main\n"
        "main(sys.argv[1:])\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'transformers', 'deepspeed', 'matplotlib', 'numpy'}\n"
        "print('loaded:', *sorted(heavy), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", str(RECIPE), "--gpus", "16", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.stderr, done.returncode) == ("loaded:\n", 0)


def plan_h100s(*words: str, achieved: Achieved = Achieved()) -> RunPlan:  # noqa: B008
    settings = derive_plan_settings(load_recipe(RECIPE, words))
    return plan_run(settings, Cluster(GPUS["H100"], 16, achieved=achieved), QWEN3_32B, lengths=LengthModel(3000))


def test_the_held_out_loss_has_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """A forward is between a fifth and a third of a step of plain fine-tuning, which may compute it twice."""
    plan = plan_h100s("methods/sft.yaml")
    assert 0.2 < plan.seconds_forward / plan.cost.seconds_step < 0.34
    for words, text in (
        (["data.validation_share=0.1", "schedule.num_epochs=null", "schedule.num_steps=95"], "Held-out loss: 11 times"),
        (["data.validation_path=absent.jsonl", "run.validate_every=null"], "Held-out loss: 2 times"),
    ):
        assert main(["plan", str(RECIPE), "--gpus", "16", "methods/sft.yaml", *words]) == 0
        assert text in capsys.readouterr().out
    seconds = 11 * plan.seconds_forward * 64 / plan.settings.batch.global_size
    share = seconds / (seconds + plan.costed_steps * plan.cost.seconds_step)
    told = describe_validation(RunConfig(output_dir="r"), replace(plan, lengths=LengthModel(num_held_out=64)))
    assert told.endswith(f"{seconds / 11:,.3g} s each for 64 sequences, {share:.1%} of the run")


def write_run(folder: Path, achieved: Achieved = Achieved(), **environment: object) -> None:  # noqa: B008
    """Write a run with the metrics that a plan predicts for these shares."""
    line = {"supervised_tokens": 32 * 3000, "sequences": 32}
    for phase, seconds in plan_h100s(achieved=achieved).cost.seconds.items():
        line[f"seconds_{phase}"] = seconds
    slow = line | {"seconds_main": 1000.0}
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(RECIPE, [f"run.output_dir={folder}"])))
    environment = {"devices": ["NVIDIA H100 80GB HBM3"] * 8, "world_size": 16} | environment
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = [{**values, "step": step} for step, values in enumerate([slow, slow, line, line, line], start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in lines))


def test_calibration_finds_the_shares_that_a_run_achieved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = with_share(replace(Achieved(), memory=0.5), 0.27)
    write_run(tmp_path / "run", true)
    achieved, described = calibrate(str(tmp_path / "run"))
    assert achieved.compute == pytest.approx(0.27, rel=1e-3) and achieved.memory == pytest.approx(0.5, rel=1e-6)
    assert ": 3 steps on NVIDIA H100 80GB HBM3, median " in described
    words = [str(RECIPE), "--gpus", "16", "--mean-tokens", "3000", "--calibrate", str(tmp_path / "run")]
    expected = plan_h100s(achieved=true).cost.seconds_step
    assert read_plan(capsys, *words)[1]["seconds_step"] == pytest.approx(expected, rel=1e-3)
    assert main(["plan", *words]) == 0
    assert described in capsys.readouterr().out


def test_runs_that_cannot_calibrate_a_plan_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "cpu", devices=["x86_64"] * 8)
    with pytest.raises(UserError, match="found devices x86_64"):
        calibrate(str(tmp_path / "cpu"))
    write_run(tmp_path / "no devices", devices=[])
    with pytest.raises(UserError, match="found an incomplete run"):
        calibrate(str(tmp_path / "no devices"))
    write_run(tmp_path / "short")
    metrics = tmp_path / "short" / "metrics.jsonl"
    two_steps = "".join(metrics.read_text().splitlines(keepends=True)[:2])
    for text in (two_steps, "{", "".join(f'{{"step": {step}}}\n' for step in range(1, 5))):
        metrics.write_text(text)
        with pytest.raises(UserError, match="metrics.jsonl"):
            calibrate(str(tmp_path / "short"))


def test_check_reports_the_cost_of_a_run_and_refuses_one_that_cannot_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", str(RECIPE), f"run.output_dir={tmp_path}/new", RECOMPUTES_ALL, "--gpu", "H100"]
    assert main([*words, "--ranks", "64"]) == 0
    second = capsys.readouterr().out.splitlines()[1]
    assert second.startswith("Plan on 64 H100 (8 nodes of 8): fits, 20.0 of 79 GiB; ")
    assert main([*words, "--ranks", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vcore-ds: memory: found 79.00 GiB of GPU memory for each rank; expected 96.70 GiB")
    _, _, remedies = error.partition("These need less memory:\n")
    changes = [line.split(":")[0].strip() for line in remedies.splitlines() if "not enough" not in line]
    assert changes[:3] == [
        "engine.deepspeed_config=ds_configs/zero3_bf16_offload_optimizer.json",
        "engine.deepspeed_config=ds_configs/zero3_bf16_offload_all.json",
        "16 ranks",
    ]
    assert main([*words, "--ranks", "8", "engine.memory_check=false"]) == 0
    assert "does not fit" in capsys.readouterr().out.splitlines()[1]
