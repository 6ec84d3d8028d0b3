"""Whether a recipe can train its model, before any weights are read."""

from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe
from vcore_ds.models.architecture_check import check_architecture
from vcore_ds.models.configuration import causal_lm_class, read_config
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.model_folder import check_model_folder
from vcore_ds.planning.model_shape import is_on_disk


def check_model(recipe: Recipe) -> None:
    """Raises UserError where the model's folder cannot serve the recipe; cheap, no weights are read."""
    check_model_folder(recipe.model.path)
    check_configuration(recipe)


def check_configuration(recipe: Recipe) -> None:
    """Raises UserError where the recipe cannot train a model of this configuration. One that is not on this machine
    passes: `vcore-ds check` needs none, and in a run the first rank downloads it."""
    path, estimator = recipe.model.path, recipe.utility.estimator if recipe.method.uses_utilities else None
    if not is_on_disk(path):
        return
    if Path(path).name == "config.json":  # which a plan can be made of
        path = str(Path(path).parent)
    if recipe.model.provider == "huggingface":
        config = read_config(path, local_files_only=True)
        check_architecture(
            path,
            config,
            attention=recipe.model.attention,
            lora=recipe.lora,
            estimator=estimator,
            expert=recipe.parallel.expert,
        )
        causal_lm = causal_lm_class(config)
        if recipe.model.gradient_checkpointing and not causal_lm.supports_gradient_checkpointing:
            raise UserError(
                f"model.gradient_checkpointing: found true together with model.path {path} ({causal_lm.__name__}), "
                "whose layers cannot be recomputed; expected false"
            )
        return
    from vcore_ds.models.megatron.adapters import adapted_layers
    from vcore_ds.models.megatron.configuration import transformer_config

    config = read_config(path)
    transformer_config(path, config, tensor=recipe.parallel.tensor, dtype=DTYPES[recipe.model.precision])
    if recipe.lora is not None:
        adapted_layers(path, config, recipe.lora)
