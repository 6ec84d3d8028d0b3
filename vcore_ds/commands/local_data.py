"""What local data tell a plan: the lengths of their sequences, and the steps of the run."""

from dataclasses import replace

from vcore_ds.common.paths import is_readable
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings
from vcore_ds.planning.spread import LengthModel


def find_lengths(recipe: Recipe) -> LengthModel:
    """The lengths of a recipe's data, as far as they are on this machine, else those of typical reasoning traces."""
    if not all(is_readable(file.path) for file in recipe.data.train_files()):
        return LengthModel()
    from vcore_ds.train.local_lengths import sample_lengths  # imports numpy, and transformers to tokenize: seconds

    return sample_lengths(recipe.data, recipe.model.path) or LengthModel()


def with_num_steps(recipe: Recipe, lengths: LengthModel) -> PlanSettings:
    """The plan's settings, with the steps of `schedule.num_epochs` where the number of training sequences is known."""
    settings, num_sequences = derive_plan_settings(recipe), lengths.num_sequences
    if settings.num_steps is not None:
        return settings
    if recipe.data.keep is not None:
        from vcore_ds.train.selection import read_selection_on_disk  # imports torch: seconds

        selection = read_selection_on_disk(recipe.data.keep)
        num_sequences = None if selection is None else len(selection.positions)
    if num_sequences is None:
        return settings
    from vcore_ds.train.settings import derive_schedule

    return replace(settings, num_steps=derive_schedule(recipe, num_sequences).num_steps)
