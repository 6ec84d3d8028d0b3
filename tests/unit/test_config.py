"""What loads, and what does not: every rule of the schema is broken, and its message checked."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.fields import Section
from vcore_ds.config.load import dump_recipe, load_recipe, make_override
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.resume import read_resolved_recipe
from vcore_ds.config.schema import SECTIONS, Recipe
from vcore_ds.config.yaml_text import dump_yaml, parse_yaml
from vcore_ds.errors import UserError


def write(folder: Path, content: dict[str, Any] | str | None = None) -> Path:
    (folder / "ds.json").write_text("{}")
    path = folder / "recipe.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content or smallest_recipe(), sort_keys=False)
    )
    return path


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as error:
        load_recipe(path, overrides)
    assert str(error.value).splitlines() == list(error.value.problems)
    return error.value.problems


def the_problem(path: Path, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


# ---------------------------------------------------------------- what loads


def test_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    assert recipe.method.name == "vcore" and recipe.method.alpha_cap == 1.0
    assert recipe.method.alpha_scope == "global_batch" and recipe.method.keep_share == 0.2
    assert recipe.utility.estimator == "jvp" and recipe.utility.rounding == "nearest"
    assert (recipe.probe.batch_size, recipe.probe.direction, recipe.probe.every) == (4, "sgd", 1)
    assert recipe.lora is None and recipe.optimizer.betas == (0.9, 0.999)
    assert recipe.batch.global_size == 32 and recipe.run.seed == 42


def test_integers_are_numbers_but_text_and_booleans_are_not(tmp_path: Path) -> None:
    path = write(tmp_path)
    loaded = load_recipe(path, ["schedule.num_steps=null", "schedule.num_epochs=2"]).schedule.num_epochs
    assert loaded == 2.0 and isinstance(loaded, float)
    assert "expected an integer" in the_problem(path, "run.seed=true")
    assert 'found "7"; expected an integer' in the_problem(path, "run.seed='7'")


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-4", "1.0e-4", "1.e-4", ".1e-3", "0.0001", "100e-6"])
def test_scientific_notation_in_file_and_override(tmp_path: Path, text: str) -> None:
    assert load_recipe(write(tmp_path), [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == 1e-4
    content = yaml.safe_dump(smallest_recipe()).replace("learning_rate: 0.1", f"learning_rate: {text}")
    assert load_recipe(write(tmp_path, content)).optimizer.learning_rate == 1e-4


def test_dates_stay_text(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path), ["run.output_dir=2026-01-31"]).run.output_dir == "2026-01-31"


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    with pytest.raises(ValidationError, match="frozen"):
        recipe.run.seed = 1  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    for name, section in SECTIONS.items():
        assert issubclass(section, Section)
        for key, field in section.model_fields.items():
            assert field.description and len(field.description) > 10, f"{name}.{key}"
    assert list(SECTIONS) == list(Recipe.model_fields)


def test_a_recipe_built_in_python_keeps_the_rules() -> None:
    with pytest.raises(ValidationError, match="exactly one of method.temperature and method.kl_budget"):
        Recipe.model_validate(smallest_recipe() | {"method": {}})


# ---------------------------------------------------------------- dump


DUMPED = [
    [],
    ["method.name=sft", "method.kl_budget=null"],
    ["method.name=random", "method.kl_budget=null", "method.keep_share=0.5"],
    ["method.name=iw_sft", "method.kl_budget=null", "data.reference_log_probabilities=reference.jsonl"],
    ["method.alpha=variance", "method.alpha_cap=null", "probe.direction=adam", "probe.every=4", "probe.clip=1.0"],
    ["utility.estimator=finite_difference", "utility.epsilon=auto", "utility.rounding=stochastic"],
    ["optimizer.name=sgd"],
    ["lora={rank: 8, alpha: 16.0, target_modules: [q_proj, v_proj]}"],
    ["method.kl_budget=null", "method.temperature=0", "utility.estimator=finite_difference", "utility.epsilon=1e-4"],
]


@pytest.mark.parametrize("overrides", DUMPED, ids=lambda overrides: " ".join(overrides) or "plain")
def test_dump_loads_to_the_same_recipe(tmp_path: Path, overrides: list[str]) -> None:
    recipe = load_recipe(write(tmp_path), overrides)
    again = tmp_path / "deeper" / "again.yaml"
    again.parent.mkdir()
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe
    assert load_recipe(again) != load_recipe(again, ["run.seed=43"])  # so that the equality above can fail


def test_a_recipe_that_version_0_6_wrote_is_read(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe).replace("probe:\n", "probe:\n  decay: 0.0\n  source: batch\n"))
    assert "decay: 0.0\n  source: batch" in path.read_text()
    assert read_resolved_recipe(path) == recipe
    assert load_recipe(path) == recipe


@settings(deadline=None)
@given(
    st.text(min_size=1)
    | st.sampled_from(["1e-4", "null", "~", "yes", "2026-01-31", "1_0", "12:30", ": #", "-1.e3", "\x85", "a\u2028b"])
    | st.sampled_from(["/my #1 repo/runs", "/a: b/runs", "[1]/runs", "/😀, {x}", "it's", "a=b"])
)
def test_any_text_survives_yaml_and_an_override(text: str) -> None:
    assert parse_yaml(dump_yaml({"key": text})).value == {"key": text}
    key, _, word = make_override("model.path", text).partition("=")
    assert (key, parse_yaml(word).value) == ("model.path", text)


def test_an_override_has_quotes_only_where_it_needs_them() -> None:
    assert make_override("run.output_dir", Path("runs/my run_2")) == "run.output_dir=runs/my run_2"
    assert make_override("run.seed", 3) == "run.seed=3"


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_survives_yaml(number: float) -> None:
    assert parse_yaml(dump_yaml({"key": number})).value == {"key": number}


# ---------------------------------------------------------------- single keys

# override -> words of the message
FIELD_PROBLEMS = [
    (
        "method.name=vcor",
        'found "vcor"; expected "vcore", "sft", "dft", "iw_sft" or "random" (`vcore` weights tokens by',
        'did you mean "vcore"?',
    ),
    ("method.name=iw-sft", 'did you mean "iw_sft"?'),
    ("method.normalization=tokens", '"sequence" or "token"', 'did you mean "token"?'),
    ("method.temperature=-1", "found -1; expected a number greater than or equal to 0 or null"),
    ("method.kl_budget=0", "found 0; expected a number greater than 0 or null", "in nats"),
    ("method.kl_budget=.inf", "a finite number"),
    ("method.kl_budget=.nan", "a finite number"),
    ("method.alpha=varience", '"loss_ratio", "variance", "effective_sample_size" or "none"', '"variance"?'),
    ("method.alpha_scope=microbatch", '"global_batch" or "micro_batch"', 'did you mean "micro_batch"?'),
    ("method.alpha_cap=0", "greater than 0 or null"),
    ("method.keep_share=0", "found 0; expected a number greater than 0", "supervised tokens"),
    ("method.keep_share=1.1", "found 1.1; expected a number less than or equal to 1"),
    ("utility.estimator=jpv", 'did you mean "jvp"?'),
    ("utility.epsilon=-1e-4", 'found -0.0001; expected a number greater than 0 or "auto" or null'),
    ("utility.epsilon=Auto", 'found "Auto"; expected a number or "auto" or null', 'did you mean "auto"?'),
    ("utility.rounding=random", '"nearest" or "stochastic"'),
    ("utility.micro_batch_size_per_rank=0", "greater than or equal to 1 or null", "Sequences per rank"),
    ("probe.batch_size=0", "greater than or equal to 1", "over all ranks"),
    ("probe.batch_size=null", 'found null; expected "all" or an integer'),
    ("probe.direction=adamw", '"sgd" or "adam"', 'did you mean "adam"?'),
    ("probe.every=0", "greater than or equal to 1", "Optimizer steps"),
    ("probe.decay=0.9", "found 0.9; expected no such key", "ends with vcore_ds 0.6"),
    ("probe.source=previous_step", "expected no such key: the direction is always the gradient of a probe batch"),
    ("probe.clip=0", "greater than 0 or null"),
    ("probe.sequence_parallel=0", 'expected "auto" or a number greater than or equal to 1'),
    ("batch.sequence_parallel=two", 'found "two"; expected "auto" or an integer'),
    ("model.path=3", "found 3; expected text"),
    ("model.path=", "found null; expected text"),
    ("model.path=''", "text that is not empty"),
    ("model.path=my #1 model", 'found a comment in "my #1 model"; expected quotes', 'model.path="my #1 model"'),
    ("model.precision=fp16", '"bf16" or "fp32"', 'did you mean "bf16"?'),
    ("model.attention=flash", '"sdpa", "flash_attention_2" or "eager"'),
    ("model.gradient_checkpointing=maybe", "true or false"),
    ("data.cutoff_length=1", "greater than or equal to 2", "in tokens"),
    ("data.cutoff_length=16384.0", "an integer"),
    ("data.overlong=cut", '"drop" or "truncate"'),
    ("data.validation_path=[a]", "text or a mapping of names to texts or null"),
    ("data.validation_path={}", "a mapping with at least one name or null"),
    ("data.validation_path={a: 3}", "text or null"),
    ("data.validation_path={a/b: c.jsonl}", "names of letters, digits and underscores"),
    ("data.reference_log_probabilities=3", "found 3; expected text or null", "vcore-ds reference"),
    ("batch.global_size=0", "greater than or equal to 1", "over all ranks and micro-batches"),
    ("batch.micro_batch_size_per_rank=-2", "greater than or equal to 1"),
    ("optimizer.name=adam", '"adamw" or "sgd"', 'did you mean "adamw"?'),
    ("optimizer.learning_rate=0", "greater than 0"),
    ("optimizer.betas=[0.9]", "found [0.9]; expected an entry at position 1"),
    ("optimizer.betas=[0.9, 0.99, 0.999]", "a list of 2 values"),
    ("optimizer.betas=0.9", "found 0.9; expected a list"),
    ("optimizer.betas=[0.9, 1]", "found 1; expected a number less than 1 at position 1"),
    ("optimizer.eps=0", "greater than 0"),
    ("optimizer.weight_decay=-1", "greater than or equal to 0"),
    ("optimizer.gradient_clipping=0", "greater than 0 or null"),
    ("schedule.num_steps=0", "greater than or equal to 1 or null"),
    ("schedule.num_epochs=0", "greater than 0 or null"),
    ("schedule.warmup_ratio=1.1", "less than or equal to 1"),
    ("schedule.warmup_ratio=-0.1", "greater than or equal to 0"),
    ("schedule.kind=linear", '"cosine" or "constant"'),
    ("run.output_dir=[]", "found []; expected text"),
    ("run.seed=-1", "greater than or equal to 0"),
    ("run.log_every=0", "greater than or equal to 1"),
    ("run.validate_every=0", "greater than or equal to 1 or null"),
    ("engine.deepspeed_config=3", "found 3; expected text"),
    ("engine.deepspeed_config=''", "text that is not empty"),
    ("engine.coalesce_gradient_reduction=2", "true or false"),
    ("engine.timeout_minutes=0", "greater than 0", "Minutes"),
]


@pytest.mark.parametrize(("override", "words"), [(first, words) for first, *words in FIELD_PROBLEMS])
def test_field_problem(tmp_path: Path, override: str, words: list[str]) -> None:
    problem = the_problem(write(tmp_path), override)
    key = override.partition("=")[0]
    assert problem.startswith(f"override {override}: {key}: found "), problem
    for word in words:
        assert word in problem


LORA_PROBLEMS = [
    ("lora=8", "lora: found 8; expected a section with keys rank, alpha, dropout, target_modules, or null"),
    ("lora={alpha: 16}", "lora.rank: found nothing; expected a value (Rank r"),
    ("lora={rank: 8}", "lora.alpha: found nothing"),
    ("lora={rank: 0, alpha: 16}", "lora.rank: found 0; expected a number greater than or equal to 1"),
    ("lora={rank: 8, alpha: 0}", "lora.alpha: found 0; expected a number greater than 0"),
    ("lora={rank: 8, alpha: 16, dropout: 1}", "lora.dropout: found 1; expected a number less than 1"),
    ("lora={rank: 8, alpha: 16, dropout: -0.1}", "lora.dropout: found -0.1; expected a number greater than or equal"),
    ("lora={rank: 8, alpha: 16, target_modules: []}", 'expected "all-linear" or a list of at least 1 value'),
    (
        "lora={rank: 8, alpha: 16, target_modules: [q, 3]}",
        'found ["q", 3]; expected "all-linear" or text at position 1',
    ),
    ("lora={rank: 8, alpha: 16, target_modules: all}", 'expected "all-linear" or a list'),
]


@pytest.mark.parametrize(("override", "words"), LORA_PROBLEMS)
def test_lora_problem(tmp_path: Path, override: str, words: str) -> None:
    problem = the_problem(write(tmp_path), override)
    assert problem.startswith(f"override {override}: lora") and words in problem


@pytest.mark.parametrize(
    "key",
    [
        "model.path",
        "data.train_path",
        "optimizer.learning_rate",
        "run.output_dir",
        "engine.deepspeed_config",
    ],
)
def test_missing_key_and_missing_section(tmp_path: Path, key: str) -> None:
    section = key.partition(".")[0]
    without_key = smallest_recipe()
    without_key[section] = {}
    lines = yaml.safe_dump(without_key, sort_keys=False).splitlines()
    path = write(tmp_path, without_key)
    assert the_problem(path).startswith(
        f"{path}:{lines.index(f'{section}: {{}}') + 1}: {key}: found nothing; expected a value ("
    )
    without_section = smallest_recipe()
    del without_section[section]
    assert the_problem(write(tmp_path, without_section)).startswith(f"{path}: {key}: found nothing; expected a value (")


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path)
    for override, nearest in {
        "method.kl_bugdet=1": '"method.kl_budget"',
        "optimizer.kl_budget=1": '"method.kl_budget"',  # right name, wrong section
        "model.micro_batch_size_per_rank=1": '"utility.micro_batch_size_per_rank" or '
        '"probe.micro_batch_size_per_rank" or "batch.micro_batch_size_per_rank"',
        "batch.batch_size=1": '"batch.global_size" or "probe.batch_size"',  # like one here, right name elsewhere
        "run.lerning_rate=1": '"optimizer.learning_rate"',  # misspelt and in the wrong section
        "utillity={}": '"utility"',
        "learning_rate=1": '"optimizer.learning_rate"',  # no section
    }.items():
        problem = the_problem(path, override)
        assert "under an unknown name; expected a " in problem
        assert problem.endswith(f"; did you mean {nearest}?")
    problem = the_problem(path, "metod.name=sft")
    assert f"metod.name: found an unknown section; expected {', '.join(SECTIONS)}" in problem
    assert problem.endswith('; did you mean "method.name=sft"?')
    assert "did you mean" not in the_problem(path, "method.zzzzzz=1")


def test_unknown_key_in_the_file_carries_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "# comment\nmethod:\n  kl_budget: 0.05\n  kl_bugdet: 0.05\n" + yaml.safe_dump(
        {name: section for name, section in smallest_recipe().items() if name != "method"}
    ))  # fmt: skip
    assert the_problem(path).startswith(f"{path}:4: method.kl_bugdet: found 0.05 under an unknown name")


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert "run.1: found 2 under an unknown name" in the_problem(path, "run={output_dir: out, 1: 2}")
    content = yaml.safe_dump(smallest_recipe(), sort_keys=False) + "3: {}\n"
    assert the_problem(write(tmp_path, content)).startswith(f"{path}:15: 3: found {{}} under an unknown name")
    content = content.replace("3: {}", "null: 1e-4")
    assert the_problem(write(tmp_path, content)).startswith(f"{path}:15: null: found 0.0001 under an unknown name")


# ---------------------------------------------------------------- rules over several keys


BATCH_WIDE = ["method.scope=sequence_and_batch", "method.batch_kl_budget=0.1"]
RULES = [
    (
        ["batch.packed_row_tokens=16384", "probe.micro_batch_size_per_rank=2"],
        "probe.micro_batch_size_per_rank: found 2 together with batch.packed_row_tokens 16384; expected 1: a "
        "micro-batch is one packed row, and packed_row_tokens says how much it holds",
    ),
    (["method.kl_budget=null"], "method.kl_budget: found neither temperature nor kl_budget; expected exactly one of "),
    (["method.temperature=2"], "found temperature 2 and kl_budget 0.05; expected exactly one of method.temperature"),
    *(
        (
            [f"method.name={name}", *also],
            f"method.kl_budget: found 0.05 together with method.name {name}; expected null: only vcore weights tokens "
            "by utility (set method.kl_budget to null, or method.name to vcore)",
        )
        for name, *also in (
            ["sft"],
            ["dft"],
            ["iw_sft", "lora={rank: 8, alpha: 16}"],
            ["random"],
        )
    ),
    (
        ["method.name=sft", "method.kl_budget=null", "method.temperature=2"],
        "method.temperature: found 2 together with method.name sft; expected null",
    ),
    (
        ["utility.estimator=finite_difference"],
        "utility.epsilon: found null together with utility.estimator finite_difference; expected the step of the "
        "finite difference: auto, or a number such as 1.0e-4 (the paper's; in bf16 it measures rounding, prefer "
        "utility.estimator jvp)",
    ),
    (
        ["utility.epsilon=1e-4"],
        "utility.epsilon: found 0.0001 together with utility.estimator jvp; expected null: jvp is exact and has no "
        "step (or set utility.estimator to finite_difference)",
    ),
    (["utility.epsilon=auto"], "utility.epsilon: found auto together with utility.estimator jvp; expected null"),
    (
        ["utility.rounding=stochastic"],
        "utility.rounding: found stochastic together with utility.estimator jvp; expected nearest: jvp perturbs "
        "nothing, so nothing is rounded (or set utility.estimator to finite_difference)",
    ),
    *(
        (
            ["method.alpha_scope=micro_batch", f"method.alpha={alpha}"],
            f"method.alpha_scope: found micro_batch together with method.alpha {alpha}; expected global_batch: this "
            "alpha does not depend on what a sequence is batched with (or set method.alpha to loss_ratio)",
        )
        for alpha in ("effective_sample_size", "none")
    ),
    (
        ["method.alpha=variance", "batch.global_size=1"],
        "method.alpha: found variance together with batch.global_size 1; expected loss_ratio: one sequence has no "
        "variance (or set batch.global_size to at least 2)",
    ),
    (
        ["method.alpha=variance", "method.alpha_scope=micro_batch"],
        "method.alpha: found variance together with batch.micro_batch_size_per_rank 1; expected loss_ratio: one "
        "sequence has no variance (or set method.alpha_scope to global_batch)",
    ),
    (
        ["probe.direction=adam", "optimizer.name=sgd"],
        "probe.direction: found adam together with optimizer.name sgd; expected sgd: the direction is the update of "
        "the optimizer that trains (or set optimizer.name to adamw)",
    ),
    (
        ["method.name=iw_sft", "method.kl_budget=null"],
        "data.reference_log_probabilities: found null together with method.name iw_sft and lora null; expected the "
        "file that `vcore-ds reference RECIPE --output FILE` makes before training",
    ),
    (
        ["method.name=dft", "method.kl_budget=null", "data.reference_log_probabilities=r.jsonl"],
        "data.reference_log_probabilities: found r.jsonl together with method.name dft; expected null: only iw_sft "
        "with lora null reads reference log-probabilities",
    ),
    (
        ["data.reference_log_probabilities=r.jsonl"],
        "data.reference_log_probabilities: found r.jsonl together with method.name vcore; expected null",
    ),
    (
        [
            "method.name=iw_sft",
            "method.kl_budget=null",
            "lora={rank: 8, alpha: 16}",
            "data.reference_log_probabilities=r.jsonl",
        ],
        "data.reference_log_probabilities: found r.jsonl together with lora, whose reference is the model without "
        "adapters; expected null",
    ),
    (
        ["model.attention=flash_attention_2", "model.precision=fp32"],
        "model.attention: found flash_attention_2 together with model.precision fp32; expected auto, sdpa or eager",
    ),
    (
        ["optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"],
        "optimizer.betas: found [0.8, 0.9] together with optimizer.name sgd; expected no such key",
    ),
    (
        ["method.scope=sequence_and_batch"],
        "method.batch_kl_budget: found null together with method.scope sequence_and_batch; expected the budget of the "
        "sequence weights in nats, such as 0.1",
    ),
    (
        ["method.batch_kl_budget=0.1"],
        "method.batch_kl_budget: found 0.1 together with method.scope sequence; expected null, or method.scope "
        "sequence_and_batch",
    ),
    (
        [*BATCH_WIDE, "method.alpha_scope=micro_batch"],
        "method.alpha_scope: found micro_batch together with method.scope sequence_and_batch; expected global_batch",
    ),
    (
        [*BATCH_WIDE, "batch.global_size=1"],
        "batch.global_size: found 1 together with method.scope sequence_and_batch; expected at least 2 sequences",
    ),
    (["probe.batch_size=all"], "probe.batch_size: found all without data.probe_path; expected a number: without a"),
    (["data.trusted_share=0.2"], "data.trusted_share: found 0.2 without data.probe_path; expected 0, or the trusted"),
    (
        ["data.trusted_share=0.01", "data.probe_path=p.jsonl"],
        "data.trusted_share: found 0.01 together with batch.global_size 32, which is 0 trusted sequence(s); expected "
        "between 1 and 31 of them",
    ),
    (
        ["data.trusted_share=0.2", "data.probe_path=p.jsonl", "method.name=random", "method.kl_budget=null"],
        "data.trusted_share: found 0.2 together with method.name random; expected 0: that method needs to know",
    ),
    (["optimizer.name=sgd", "optimizer.eps=1e-8"], "optimizer.eps: found 1e-08 together with optimizer.name sgd"),
    (["schedule.num_steps=null"], "schedule.num_steps: found neither num_steps nor num_epochs; expected exactly one"),
    (["schedule.num_epochs=2"], "found num_steps 3 and num_epochs 2; expected exactly one of schedule.num_steps"),
    (["run.validate_every=5"], "run.validate_every: found 5 without data.validation_path; expected null, or held-out"),
]


@pytest.mark.parametrize(("overrides", "words"), RULES, ids=lambda value: " ".join(value) if value is list else None)
def test_rule(tmp_path: Path, overrides: list[str], words: str) -> None:
    problem = the_problem(write(tmp_path), *overrides)
    assert words in problem
    assert problem.split(": ")[0] in [f"override {override}" for override in overrides], "the user's own key is named"


REMEDIES = [
    (["method.name=dft"], [["method.kl_budget=null"], ["method.name=vcore"]]),
    (["utility.estimator=finite_difference"], [["utility.epsilon=auto"], ["utility.epsilon=1.0e-4"]]),
    (["utility.epsilon=1e-4"], [["utility.epsilon=null"], ["utility.estimator=finite_difference"]]),
    (["utility.rounding=stochastic"], [["utility.rounding=nearest"]]),
    (["method.alpha_scope=micro_batch", "method.alpha=none"], [["method.alpha_scope=global_batch"]]),
    (["method.alpha_scope=micro_batch", "method.alpha=effective_sample_size"], [["method.alpha=loss_ratio"]]),
    (["method.alpha=variance", "batch.global_size=1"], [["method.alpha=loss_ratio"], ["batch.global_size=2"]]),
    (
        ["method.alpha=variance", "method.alpha_scope=micro_batch"],
        [["method.alpha_scope=global_batch"]],
    ),
    (
        ["batch.packed_row_tokens=16384", "batch.micro_batch_size_per_rank=4"],
        [["batch.micro_batch_size_per_rank=1"]],
    ),
    (["probe.direction=adam", "optimizer.name=sgd"], [["probe.direction=sgd"], ["optimizer.name=adamw"]]),
    (
        ["method.name=iw_sft", "method.kl_budget=null"],
        [["data.reference_log_probabilities=r.npz"], ["lora={rank: 8, alpha: 16}"]],
    ),
    (["data.reference_log_probabilities=r.npz"], [["data.reference_log_probabilities=null"]]),
    (["method.scope=sequence_and_batch"], [["method.batch_kl_budget=0.1"]]),
    (["method.batch_kl_budget=0.1"], [["method.scope=sequence_and_batch"], ["method.batch_kl_budget=null"]]),
]


@pytest.mark.parametrize(("overrides", "remedies"), REMEDIES, ids=lambda value: " ".join(map(str, value)))
def test_the_remedy_of_a_rule_helps(tmp_path: Path, overrides: list[str], remedies: list[list[str]]) -> None:
    path = write(tmp_path)
    for remedy in remedies:
        key, _, value = remedy[0].partition("=")
        words = re.escape(key.partition(".")[2] or key), re.escape(value.partition("{")[0].removesuffix(".npz"))
        assert all(re.search(word, the_problem(path, *overrides)) for word in words), "the message names the remedy"
        load_recipe(path, [*overrides, *remedy])


@pytest.mark.parametrize(
    "overrides",
    [
        # Keys of vcore say nothing about a method that does not read them, so that a method is exchanged in one word.
        ["method.name=sft", "method.kl_budget=null", "probe.direction=adam", "optimizer.name=sgd"],
        ["method.name=dft", "method.kl_budget=null", "method.alpha_scope=micro_batch", "method.alpha=none"],
        ["method.name=random", "method.kl_budget=null", "method.alpha=variance", "batch.global_size=1"],
        ["method.name=iw_sft", "method.kl_budget=null", "lora={rank: 8, alpha: 16}"],
        ["method.alpha=variance", "method.alpha_scope=micro_batch", "batch.micro_batch_size_per_rank=2"],
        ["method.alpha=variance", "method.alpha_scope=micro_batch", "batch.packed_row_tokens=16384"],
        ["method.alpha=effective_sample_size"],
        ["utility.estimator=finite_difference", "utility.epsilon=auto", "utility.rounding=stochastic"],
        ["probe.direction=adam", "probe.clip=0.5", "probe.every=8"],
        [*BATCH_WIDE, "method.name=sft", "method.kl_budget=null"],
        [*BATCH_WIDE, "method.base_measure=dft", "utility.estimator=finite_difference", "utility.epsilon=auto"],
        ["method.name=sft", "method.kl_budget=null", "data.probe_path=p.jsonl", "data.trusted_share=0.25"],
    ],
    ids=" ".join,
)
def test_what_is_no_contradiction(tmp_path: Path, overrides: list[str]) -> None:
    load_recipe(write(tmp_path), overrides)


def test_a_rule_broken_by_the_file_names_file_and_line(tmp_path: Path) -> None:
    broken = smallest_recipe() | {"schedule": {"num_steps": 3, "num_epochs": 1.0}}
    line = yaml.safe_dump(broken, sort_keys=False).splitlines().index("  num_steps: 3") + 1
    path = write(tmp_path, broken)
    assert the_problem(path).startswith(f"{path}:{line}: schedule.num_steps: found num_steps 3 and num_epochs 1.0")


def test_fields_and_rules_are_reported_together(tmp_path: Path) -> None:
    broken = smallest_recipe()
    broken["model"]["precision"] = "fp16"  # a field
    broken["model"]["attention"] = "flash_attention_2"  # its rule reads precision, which is wrong: not judged
    broken["method"]["temperature"] = 1.0  # a rule in a section of its own
    broken["utility"] = {"epsilon": 1e-4, "micro_batch": 3}  # a rule in a section with an unknown key
    del broken["run"]  # missing
    path = write(tmp_path, broken)
    found = problems(path, "optimizer.lr", "optimizer.learning_rate=fast")
    keys = [re.sub(r"^(override )?\S+: ", "", problem).split(": ")[0] for problem in found]
    assert sorted(keys) == [
        'found "optimizer.lr"; expected section.key=value or FILE.yaml; did you mean "optimizer.lr=VALUE"?',
        "method.kl_budget",
        "model.precision",
        "optimizer.learning_rate",
        "run.output_dir",
        "utility.epsilon",
        "utility.micro_batch",
    ]


def test_a_rule_is_not_judged_on_a_wrong_key(tmp_path: Path) -> None:
    assert "method.temperature: found" in the_problem(write(tmp_path), "method.temperature=hot")
    assert "schedule: found null" in the_problem(write(tmp_path), "schedule=null")


# ---------------------------------------------------------------- the file


def test_duplicate_keys_and_the_other_problems_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path, yaml.safe_dump(smallest_recipe(), sort_keys=False) + "lora: null\nlora: {rnk: 3}\nmodel:\n  path: b\n"
    )
    found = problems(path)
    assert f"{path}:16: lora: found a second time (first in line 15); expected once" in found
    assert f"{path}:17: model: found a second time (first in line 3); expected once" in found
    assert any("lora.rnk: found 3 under an unknown name" in problem for problem in found)


def test_duplicate_key_in_a_section(tmp_path: Path) -> None:
    content = yaml.safe_dump(smallest_recipe(), sort_keys=False).replace(
        "  kl_budget: 0.05", "  kl_budget: 0.05\n  kl_budget: 1"
    )
    path = write(tmp_path, content)
    assert the_problem(path) == f"{path}:3: method.kl_budget: found a second time (first in line 2); expected once"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("method:\n  name: [vcore\nmodel: {}\n", r":3:6: cannot be read as YAML: "),
        ("method:\n\tname: vcore\n", r":2:1: cannot be read as YAML: "),
        ("a: !python/object:os.system x\n", r":1:4: cannot be read as YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", r":2:1: cannot be read as YAML: but found another document"),
        ("a: \x01\n", r"cannot be read as YAML: "),
        ("- a\n- b\n", r'found \["a", "b"\]; expected sections \(method, '),
        ("just text\n", r'found "just text"; expected sections'),
        ("", r"found nothing; expected sections"),
        ("# only a comment\n", r"found nothing; expected sections"),
        ("{? [a] : b}\n", r"found unhashable key"),
        ("a: &a {b: *a}\n", r":1:4: cannot be read as YAML: an alias within the value that it stands for"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: str, words: str) -> None:
    path = write(tmp_path)
    path.write_text(content)
    problem = the_problem(path)
    assert problem.startswith(str(path)) and re.search(words, problem), problem


def test_unreadable_files(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert the_problem(tmp_path / "recip.yaml").endswith(
        f'found no such file; expected a recipe (YAML); did you mean "{path}"?'
    )
    assert "found a folder; expected a recipe" in the_problem(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: ä".encode("latin-1"))
    assert "bytes that are not UTF-8" in the_problem(tmp_path / "latin.yaml")
    assert "cannot be read" in the_problem(path / "below.yaml")


def test_a_recipe_error_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        load_recipe(tmp_path / "none.yaml")


# ---------------------------------------------------------------- overrides


def test_overrides_apply_in_order_and_open_sections(tmp_path: Path) -> None:
    path = write(tmp_path, smallest_recipe() | {"lora": None})
    recipe = load_recipe(path, ["run.seed=1", "lora.rank=16", "lora.alpha=32", "run.seed=2"])
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha, recipe.run.seed) == (16, 32.0, 2)
    assert load_recipe(path, ["lora={rank: 4, alpha: 8}", "lora.rank=2"]).lora.rank == 2  # type: ignore[union-attr]
    with_lora = write(tmp_path, smallest_recipe() | {"lora": {"rank": 8, "alpha": 16}})
    assert load_recipe(with_lora, ["lora=null"]).lora is None


def test_lora_rank_alone_on_null_asks_for_alpha(tmp_path: Path) -> None:
    assert "lora.alpha: found nothing" in the_problem(write(tmp_path), "lora.rank=16")


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "lora"])
def test_section_null(tmp_path: Path, section: str) -> None:
    words = f"override {section}=null: {section}: found null; expected a section with keys "
    assert the_problem(write(tmp_path), f"{section}=null").startswith(words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed", 'found "run.seed"; expected section.key=value or FILE.yaml; did you mean "run.seed=VALUE"?'),
        ("kl_budget", 'expected section.key=value or FILE.yaml; did you mean "method.kl_budget=VALUE"?'),
        ("run", 'found "run"; expected section.key=value or FILE.yaml; did you mean "run.KEY=VALUE"?'),
        ("--run.seed=1", 'expected section.key=value; did you mean "run.seed=1"?'),
        ("=1", 'found "=1"; expected section.key=value'),
        ("run.seed.deep=1", 'found "run.seed.deep=1"; expected section.key=value'),
        ("run.seed =1", 'found "run.seed =1"; expected section.key=value'),
        ("", 'found ""; expected section.key=value'),
        ("run.seed=[1", "run.seed: cannot be read as YAML: "),
        ("lora={rank: 8, rank: 9, alpha: 1}", "lora.rank: found a second time; expected once"),
    ],
)
def test_malformed_override(tmp_path: Path, override: str, words: str) -> None:
    problem = the_problem(write(tmp_path), override)
    assert problem.startswith(f"override {override}: ") and words in problem


def test_a_whole_section_replaces_what_was_overridden_before(tmp_path: Path) -> None:
    section = "lora={rank: -1, alpha: 1}"
    assert the_problem(write(tmp_path), "lora.rank=0", section).startswith(f"override {section}: lora.rank: found -1")


def test_override_of_a_section_that_is_no_section(tmp_path: Path) -> None:
    path = write(tmp_path, smallest_recipe() | {"run": 5})
    assert "run: found 5; expected a section with keys output_dir" in the_problem(path, "run.seed=1")


# ---------------------------------------------------------------- paths


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = load_recipe(
        write(tmp_path),
        ["model.path=~/m", "data.train_path=a/t.jsonl", "data.validation_path=~/v.jsonl", "run.output_dir=~/o"],
    )
    assert (recipe.model.path, recipe.run.output_dir) == ("/home/someone/m", "/home/someone/o")
    assert (recipe.data.train_path, recipe.data.validation_path) == ("a/t.jsonl", "/home/someone/v.jsonl")
    assert recipe.data.validation_paths() == {"": "/home/someone/v.jsonl"}
    built = Recipe.model_validate(smallest_recipe() | {"model": {"path": "~/m"}})
    assert built.model.path == "/home/someone/m"


def test_held_out_sets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = load_recipe(
        write(tmp_path), ["data.validation_path={right: ~/r.jsonl, 1: w.jsonl, no: n.jsonl}", "run.validate_every=1"]
    )
    assert recipe.data.validation_paths() == {"right": "/home/someone/r.jsonl", "1": "w.jsonl", "no": "n.jsonl"}
    assert load_recipe(write(tmp_path)).data.validation_paths() == {}


def test_an_unknown_user_stays_as_written(tmp_path: Path) -> None:
    path = "~no_such_user_here/m"
    assert load_recipe(write(tmp_path), [f"model.path={path}"]).model.path == path


def test_deepspeed_config_is_looked_up_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    (cwd / "here.json").write_text("{}")
    (cwd / "ds.json").write_text("{}")

    def found(written: str) -> str:
        return load_recipe(path, [f"engine.deepspeed_config={written}"]).engine.deepspeed_config

    assert found("ds.json") == str(tmp_path / "ds.json")  # the recipe's folder comes first
    assert found("here.json") == str(cwd / "here.json")
    repository = Path(__file__).resolve().parents[2]
    assert found("ds_configs/zero3_fp32.json") == "ds_configs/zero3_fp32.json"
    assert found(str(repository / "ds_configs" / "zero3_fp32.json")) == "ds_configs/zero3_fp32.json"
    assert found(str(cwd / "here.json")) == str(cwd / "here.json")
    problem = the_problem(path, "engine.deepspeed_config=nowhere.json")
    for folder in (tmp_path, cwd, repository):
        assert str(folder / "nowhere.json") in problem
    assert '"ds_configs/zero3_bf16.json"' in problem
