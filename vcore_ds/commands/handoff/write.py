"""From a run to the folder that verl or TRL starts from: weights, data, reward, launch script, versions."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vcore_ds.commands.handoff.data import HandedRows, read_rows, write_parquet
from vcore_ds.commands.handoff.scripts import (
    check_trl_overrides,
    length_note,
    trl_script,
    trl_settings,
    verl_script,
    versions,
)
from vcore_ds.commands.handoff.settings import PROMPT, paper_settings
from vcore_ds.config.schema import Recipe
from vcore_ds.data.rendering import check_tokenizer
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.user_paths import refuse_existing, writing
from vcore_ds.models.configuration import read_config
from vcore_ds.results.model_card import METHODS
from vcore_ds.results.run_reader import read_recipe_of

NEW_FOLDER = "a new folder that can be written, with room for the weights"
_PARTS = Path(__file__).parent


@dataclass(frozen=True)
class HandoffRequest:
    """What the user asks for."""

    run: Path
    to: Literal["verl", "trl"]
    data: str
    """Problems with answers: a file, a folder or a hub id."""
    output: Path
    overrides: dict[str, str]
    """Settings by verl's names, for TRL too."""
    checkpoint: str | None
    from_base: bool
    """Hand over the model that the run began with, for comparison."""
    faithful: bool
    prompt: Literal["math", "plain"]
    sample: int | None
    held_out: int
    seed: int
    split: str


def hand_over(request: HandoffRequest) -> None:
    """Writes the folder, and prints what is in it.

    Raises:
        UserError: for whatever the user can fix; no folder is left.
    """
    recipe = read_recipe_of(request.run)
    refuse_existing(request.output, NEW_FOLDER)
    limit = getattr(read_config(recipe.model.path).get_text_config(), "max_position_embeddings", None)
    if request.to == "trl":
        check_trl_overrides(request.overrides)
    settings = paper_settings(request.overrides, faithful=request.faithful, model_limit=limit)
    in_trl = trl_settings(settings, seed=request.seed) if request.to == "trl" else {}
    tokenizer = load_tokenizer(recipe.model.path)
    check_tokenizer(tokenizer)
    if "date_string" in tokenizer.get_chat_template():  # or prompts would differ from day to day, and from training's
        settings["+data.apply_chat_template_kwargs.date_string"] = "26 Jul 2024"
    rows = read_rows(
        request.data,
        tokenizer,
        prompt=request.prompt,
        max_prompt_tokens=int(settings[PROMPT]),
        sample=request.sample,
        held_out=request.held_out,
        seed=request.seed,
        split=request.split,
    )
    with writing("--output", request.output, NEW_FOLDER), written_aside(request.output) as unfinished:
        unfinished.mkdir()
        _write_weights(request, recipe, unfinished)
        _write_rest(request, recipe, in_trl or settings, rows, unfinished)
    _say(request, settings, rows)


def _write_weights(request: HandoffRequest, recipe: Recipe, folder: Path) -> None:
    """The merged model or the adapter by `vcore-ds export`; nothing where the base model itself is handed over."""
    if request.from_base:
        return
    result = request.run / "model"
    if recipe.lora is None and request.checkpoint is None and result.is_dir():
        shutil.copytree(result, folder / "model")
        return
    keeps_adapter = recipe.lora is not None and request.to == "trl"
    words = ["export", str(request.run), "--output", str(folder / ("adapter" if keeps_adapter else "model"))]
    words += ["--merge"] if recipe.lora is not None and not keeps_adapter else []
    words += ["--checkpoint", request.checkpoint] if request.checkpoint is not None else []
    # A process of its own: commands do not import each other, and its memory is free again afterwards.
    print("Exporting the weights", flush=True)
    done = subprocess.run([sys.executable, "-m", "vcore_ds.cli", *words], capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("vcore-ds: ")
        raise UserError(f"the weights of {request.run} cannot be exported: {said or f'exit code {done.returncode}'}")


def _write_rest(
    request: HandoffRequest, recipe: Recipe, settings: dict[str, Any], rows: HandedRows, folder: Path
) -> None:
    """Everything but the weights. `settings` are by the names of what will train."""
    write_parquet(folder / "train.parquet", rows.train)
    write_parquet(folder / "validation.parquet", rows.held_out)
    shutil.copyfile(_PARTS / "reward.py", folder / "reward.py")
    what = f"the base model of {request.run.resolve().name}" if request.from_base else _described(request, recipe)
    base = _absolute(recipe.model.path)
    title = f"Continues with {request.to} from {what}."
    if request.to == "verl":
        (folder / "launch.sh").write_text(verl_script(title, base if request.from_base else None, settings))
    else:
        shutil.copyfile(_PARTS / "trl_train.py", folder / "train.py")
        is_adapter = (folder / "adapter").is_dir()
        trained = base if request.from_base else "adapter" if is_adapter else "model"
        found = {"folder": trained, "base": base if is_adapter else None, **settings}
        (folder / "settings.json").write_text(json.dumps(found, indent=2) + "\n")
        (folder / "launch.sh").write_text(trl_script(title))
    (folder / "launch.sh").chmod(0o755)
    files = [f"{name}: sha256 {_hash(folder / name)}" for name in ("train.parquet", "validation.parquet", "reward.py")]
    data = [f"data: {Path(request.data).name}, {len(rows.train):,} problems of seed {request.seed}", *files]
    (folder / "VERSIONS").write_text(versions(request.to, what, data))


def _described(request: HandoffRequest, recipe: Recipe) -> str:
    base = Path(recipe.model.path).name
    return f"{request.run.resolve().name} ({base}, {METHODS[recipe.method.name]})"


def _absolute(path: str) -> str:
    """A folder by its whole path, so that the scripts work from anywhere; hub ids as they are."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _say(request: HandoffRequest, settings: dict[str, str], rows: HandedRows) -> None:
    for reason, number in rows.left_out.items():
        print(f"{number:,} problems left out: {reason}")
    note = length_note(settings)
    if note is not None:
        print(note)
    batch = int(settings["data.train_batch_size"])
    if len(rows.train) < batch:
        print(f"Fewer problems than a batch ({batch}): set data.train_batch_size, or {request.to} makes no step")
    print(
        f"Result: {request.output}, {len(rows.train):,} problems to learn from and {len(rows.held_out):,} held out\n"
        f"Start it where {request.to} is installed: bash {request.output / 'launch.sh'} grpo"
    )
