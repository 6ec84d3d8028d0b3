"""Whether the folder of a recipe's run holds that very run, which is then resumed."""

from contextlib import suppress
from pathlib import Path

from vcore_ds.config.resume import differing_keys, read_resolved_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.errors import UserError
from vcore_ds.files.aside import unfinished_path
from vcore_ds.files.locks import LOCK
from vcore_ds.files.run_folder import RECIPE, export_folder
from vcore_ds.files.user_paths import writing

_OTHER_LAYERS = (
    ". A checkpoint is resumed with the model.provider and parallel.tensor that it was saved with: to change them, "
    "export it (vcore-ds export) and give the result to a new run as its model.path"
)


def can_resume(recipe: Recipe) -> bool:
    """Whether run.output_dir holds this very run, not finished; False where it is new or empty.

    Raises:
        UserError: it holds something else, which a run never overwrites, or cannot be looked into.
    """
    with writing("run.output_dir", Path(recipe.run.output_dir)):
        return _holds_this_run(recipe)


def _holds_this_run(recipe: Recipe) -> bool:
    folder = Path(recipe.run.output_dir)
    with suppress(FileNotFoundError):
        folder.stat()  # `is_file` is silent about a path that no folder can have: below a file, through a circular link
    is_run = (folder / RECIPE).is_file()
    if recipe.checkpoint.resume == "never" or not is_run:
        if folder.exists() and (
            not folder.is_dir() or {path.name for path in folder.iterdir()} - {unfinished_path(Path(RECIPE)).name, LOCK}
        ):
            what = "holds another run" if is_run else "is not an empty folder"
            raise UserError(
                f"run.output_dir: {folder}: {what}; expected a new or empty one. Set run.output_dir, or remove it"
            )
        return False
    result = export_folder(folder, is_adapter=recipe.lora is not None)
    if result.exists():
        raise UserError(
            f"run.output_dir: {folder}: holds a run that has finished, with its result in "
            f"{result.name}/; expected a new folder, or a run that was stopped. Set run.output_dir"
        )
    try:
        there = read_resolved_recipe(folder / RECIPE)
    except UserError as error:
        raise UserError(
            f"run.output_dir: {folder}: holds another run, with a recipe that this version does not know: {error}; "
            "expected a new folder, or a run of this recipe. Set run.output_dir"
        ) from None
    differing = differing_keys(there, recipe)
    if differing:
        lines = "\n".join(f"  {key}: {value!r} there, {wanted!r} here" for key, (value, wanted) in differing.items())
        raise UserError(
            f"run.output_dir: {folder}: holds a run of another recipe:\n{lines}\n"
            "expected the same values, to resume it, or a new folder. Set these keys as they are there, or set "
            "run.output_dir" + (_OTHER_LAYERS if differing.keys() & {"model.provider", "parallel.tensor"} else "")
        )
    return True
