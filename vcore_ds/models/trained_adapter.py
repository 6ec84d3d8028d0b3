"""A trained adapter, read from its folder onto the model that it belongs to."""

import warnings
from pathlib import Path

import peft
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from transformers import PreTrainedModel

from vcore_ds.errors import UserError, first_line
from vcore_ds.files.user_paths import reading
from vcore_ds.models.lora_linear import add_before_rounding
from vcore_ds.models.lora_targets import names_as_they_are, read_as_layers


def add_trained_adapter(model: PreTrainedModel, folder: Path, base: str) -> PeftModel:
    """The model with the adapter of a folder, for inference, with the forward of training (`lora_linear`); in place.

    Args:
        base: what the model was loaded from, for messages.

    Raises:
        UserError: the adapter cannot be read, or is of another base model: it has layers that this one has not, or of
            other sizes.
    """
    with reading("adapter", folder, "a folder with a trained adapter"):
        try:
            config = peft.LoraConfig.from_pretrained(str(folder))
            read_as_layers(config)
            with warnings.catch_warnings(), names_as_they_are():
                # peft asks transformers for gradient checkpointing by the name it had before 5.23.
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
                adapted = PeftModel.from_pretrained(model, str(folder), config=config)
            with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
                stored = set(file.keys())
        except FileNotFoundError:
            raise UserError(
                f"adapter: {folder}: found no {SAFETENSORS_WEIGHTS_NAME}; expected the weights of an adapter"
            ) from None
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            if isinstance(error, RuntimeError) and "size mismatch" in str(error):
                reason = next(line.strip() for line in str(error).splitlines() if "size mismatch" in line)
            raise UserError(_other_base(folder, base, reason)) from None
    differing = sorted(stored ^ set(get_peft_model_state_dict(adapted)))
    if differing:
        raise UserError(_other_base(folder, base, f"{differing[0]} is in one of them only"))
    add_before_rounding(adapted)
    return adapted


def _other_base(folder: Path, base: str, reason: str) -> str:
    return (
        f"adapter: {folder}: does not fit the model {base}: {reason:.300}; expected an adapter of this very model. "
        "Name the model that it was trained from"
    )
