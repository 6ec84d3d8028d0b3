"""`vcore-ds keys`: every key of the schema, docs/keys.md with them, and the JSON Schema for editors."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from vcore_ds.commands.cli import main
from vcore_ds.config.load import SHIPPED_RECIPES, parse_yaml
from vcore_ds.config.problems import recipe_keys
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "keys.md"
JSON_SCHEMA = SHIPPED_RECIPES / "recipe.schema.json"


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "write it anew: vcore-ds keys --markdown > docs/keys.md"


def test_every_key_is_described() -> None:
    keys = recipe_keys()
    kinds = SECTIONS | {".".join(names): k for names, k in SUBSECTIONS.items()}
    assert keys.keys() == {f"{name}.{key}" for name, kind in kinds.items() for key in kind.key_names()}
    assert all(len(key.meaning) > 10 and key.meaning.endswith((".", "}.")) for key in keys.values())


def test_sections_and_keys_are_looked_up_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "probe.every", "parallel"]) == 0
    out = capsys.readouterr().out
    assert "  probe.every: a whole number of at least 1 (default 1)\n" in out and "parallel.tensor: 1, 2, 4 or 8" in out
    assert "probe.clip" not in out and "optimizer" not in out
    assert main(["keys", "checkpointing"]) == 0
    assert "model.gradient_checkpointing: " in capsys.readouterr().out
    assert main(["keys", "max_seq_length"]) == 0
    assert capsys.readouterr().out.count("\n  data.") == 1
    for name in ("espilon", "utility.espilon"):
        assert main(["keys", name]) == 2
        error = capsys.readouterr().err
        assert f"keys: found {name}; expected a section, section.key or a word of a key's meaning; did" in error
        assert error.endswith('; did you mean "utility.epsilon"?\n')


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = json.loads(JSON_SCHEMA.read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_the_json_schema_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--json-schema"]) == 0
    remedy = "write it anew: vcore-ds keys --json-schema > launch_scripts/recipes/recipe.schema.json"
    assert capsys.readouterr().out == JSON_SCHEMA.read_text(), remedy
    assert main(["keys", "method", "--json-schema"]) == 2


def test_the_json_schema_has_every_key_with_default_and_meaning(validator: jsonschema.Draft7Validator) -> None:
    schema: dict[str, Any] = validator.schema

    def find_properties(node: dict[str, Any]) -> dict[str, Any]:
        """The keys of a section, which may be null."""
        (reference,) = (branch["$ref"] for branch in node.get("anyOf", [node]) if "$ref" in branch)
        return schema["$defs"][reference.rpartition("/")[2]]["properties"]

    for dotted, key in recipe_keys().items():
        *sections, name = dotted.split(".")
        keys = schema["properties"]
        for section in sections:
            keys = find_properties(keys[section])
        assert keys[name]["description"] == key.meaning
        default = keys[name].get("default", "required")
        assert (default if isinstance(default, str) else json.dumps(default)) == (key.default or "required")


def test_every_shipped_file_follows_the_json_schema(validator: jsonschema.Draft7Validator) -> None:
    for path in SHIPPED_RECIPES.rglob("*.yaml"):
        validator.validate(parse_yaml(path.read_text())[0])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("lora: null", None),
        ("base: [presets/paper, mine.yaml]", None),
        ("method: {kl_budget: 1}", None),
        ("utility: {epsilon: auto}", None),
        ("data: {validation_path: {a_set: file.jsonl}, keep: {scores: folder, top: 0.5}}", None),
        ("optimizer: {betas: [0.9, 0.95]}", None),
        ("methods: {kl_budget: 1}", ""),
        ("method: {kl_bugdet: 1}", "method"),
        ("method: {kl_budget: 0}", "method.kl_budget"),
        ("batch: {global_size: '32'}", "batch.global_size"),
        ("batch: {global_size: 0}", "batch.global_size"),
        ("batch: {global_size: 1.5}", "batch.global_size"),
        ("parallel: {tensor: 3}", "parallel.tensor"),
        ("lora: 8", "lora"),
        ("lora: {rank: null}", "lora"),
        ("data: {keep: {top: 2}}", "data.keep"),
        ("data: {validation_path: {a/b: file.jsonl}}", "data.validation_path"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas"),
        ("engine: {memory_check: 1}", "engine.memory_check"),
        ("track: {trackers: [wadnb]}", "track.trackers.0"),
        ("base: 1", "base"),
    ],
)
def test_the_json_schema_accepts_a_value_or_rejects_it_at_its_place(
    validator: jsonschema.Draft7Validator, text: str, place: str | None
) -> None:
    errors = validator.iter_errors(parse_yaml(text)[0])
    assert [".".join(map(str, error.path)) for error in errors] == [place] * (place is not None)
