"""Checks that a model can be trained with the settings of a run, before any weights are read."""

from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.models.architecture_check import check_architecture
from vcore_ds.models.configuration import causal_lm_class, read_config
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.model_folder import check_model_folder
from vcore_ds.planning.model_shape import is_on_disk
from vcore_ds.planning.settings import PlanSettings


def check_model(settings: PlanSettings) -> None:
    """Raises UserError where the model's folder is incomplete or cannot be trained so; reads no weights."""
    check_model_folder(settings.model.path)
    check_configuration(settings)


def check_configuration(settings: PlanSettings) -> None:
    """Raises UserError where a model of this configuration cannot be trained so. One that is not on this machine
    passes: `vcore-ds check` needs none, and in a run the first rank downloads it."""
    path = settings.model.path
    if not is_on_disk(path):
        return
    if Path(path).name == "config.json":  # which a plan can be made of
        path = str(Path(path).parent)
    if settings.model.provider == "huggingface":
        config = read_config(path, local_files_only=True)
        check_architecture(
            path,
            config,
            attention=settings.model.attention,
            lora=settings.lora,
            estimator=settings.estimator,
            expert=settings.parallel.expert,
        )
        causal_lm = causal_lm_class(config)
        if settings.model.gradient_checkpointing and not causal_lm.supports_gradient_checkpointing:
            raise UserError(
                f"model.gradient_checkpointing: found true together with model.path {path} ({causal_lm.__name__}), "
                "whose layers cannot be recomputed; expected false"
            )
        return
    from vcore_ds.models.megatron.adapters import find_adapted_layers
    from vcore_ds.models.megatron.configuration import transformer_config

    config = read_config(path)
    transformer_config(path, config, tensor=settings.parallel.tensor, dtype=DTYPES[settings.model.precision])
    if settings.lora is not None:
        find_adapted_layers(path, config, settings.lora)
