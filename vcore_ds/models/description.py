"""What is read from a model's folder: its configuration, checked, the headers of its weights, and the model without
weights. Each is read once for as long as the files stay the same."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, find_adapter_config_file
from transformers.utils.hub import get_checkpoint_shard_files

from vcore_ds.common.errors import UserError, first_line, last_line
from vcore_ds.data.hub import check_on_hub
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.safetensors_ranges import StoredTensor, read_header, read_weight_map
from vcore_ds.planning.known_models import CONFIG_NAME, QWEN3_32B, read_config_file
from vcore_ds.planning.model_shape import (
    ATTENTION_LAYERS,
    OTHER_LAYERS,
    REQUIRED_SIZES,
    SIZE_NAMES,
    ModelShape,
    make_shape,
)

_EXPECTED = "expected a decoder-only language model (Qwen3, Llama, ...)"

VISION_LANGUAGE = (
    "gemma3", "gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Types of vision-language models whose language model can be trained: on text, it alone computes the model's logits
from token ids and positions."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""By their names in recipes and on command lines."""


class ModelDescription:
    """A model's folder as it was read. Its members are shared: copy what you change."""

    def __init__(self, path: str, config: PretrainedConfig):
        """`path`: folder or hub id."""
        self.path, self.config = path, config

    @cached_property
    def empty(self) -> PreTrainedModel:
        """The model on the meta device, for names and shapes."""
        return build_empty_model(self.path, self.config)

    @cached_property
    def obstacle(self) -> str | None:
        """Why transformers has to read the weights, since it does more than copy them; completes "weights are read by
        one process, since ...". None where `stored` is all of them."""
        for key in ("quantization_config", "transformers_weights", "fusion_config"):
            if getattr(self.config, key, None) is not None:
                return f"{CONFIG_NAME} has a {key}"
        with refuse_unreadable_model(self.path):
            return None if find_adapter_config_file(self.path) is None else "there is an adapter among them"

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Positions of the tensors in safetensors files, by their names there; downloads the files of a hub id.
        Reading it raises UserError for files that are missing, damaged or of another model."""
        stored: dict[str, StoredTensor] = {}
        files, names = self._find_files()
        with refuse_unreadable_model(self.path):
            for file in files:  # in transformers' order, where the later of two tensors of one name counts
                stored |= read_header(file)
        if missing := sorted(names - stored.keys()):
            raise UserError(
                f"model.path: {self.path}: {SAFE_WEIGHTS_INDEX_NAME} names {missing[0]}, which is in none of its files "
                f"({len(missing):,} such names); index and files are of different models: download the model again"
            )
        return stored

    def _find_files(self) -> tuple[list[Path], set[str]]:
        """Find the files of weights, and the names of tensors that their index has."""
        with refuse_unreadable_model(self.path):
            if (single := find_file(self.path, SAFE_WEIGHTS_NAME)) is not None:
                return [single], set()
            if (index := find_file(self.path, SAFE_WEIGHTS_INDEX_NAME)) is not None:
                names = set(read_weight_map(index))
                return [Path(file) for file in get_checkpoint_shard_files(self.path, str(index))[0]], names
        raise UserError(
            f"model.path: {self.path}: found neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; expected all "
            "weights, as safetensors (transformers' save_pretrained converts others)"
        )

    @property
    def vocabulary_size(self) -> int:
        """The vocabulary size: token ids are below it."""
        return self.config.get_text_config().vocab_size

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes that determine time and memory of a pass.

        Architectures with unknown field names are assumed to be dense and Llama-like; those without attention heads get
        the sizes of Qwen3-32B, without packing and sequence parallelism.
        """
        config = self.config
        sizes = {size: _read_size(config, names[0]) for size, names in SIZE_NAMES.items()}
        text = config.get_text_config()
        # Jamba, Falcon-H1 and others derive layer_types, which to_dict() leaves out.
        shape = make_shape(sizes, text.to_dict() | {"layer_types": getattr(text, "layer_types", None)})
        if shape is None:
            missing = next(SIZE_NAMES[size][0] for size in REQUIRED_SIZES if sizes[size] is None)
            why = f"whose configuration has no single {missing}"
            return replace(QWEN3_32B, no_sequence_parallelism=why, unpackable=why, hidden_size=0)
        if can_replace_attention(config):
            return shape
        # Such an attention may not isolate packed sequences.
        why = "whose attention cannot be replaced"
        return replace(shape, no_sequence_parallelism=why, unpackable=shape.unpackable or why)


def read_model(path: str, *, local_files_only: bool = False) -> ModelDescription:
    """Read the description of a causal language model in a folder or on the hub, once while its files stay the same.
    Raises UserError if the configuration cannot be read, is inconsistent, or is of another kind of model."""
    if not local_files_only:
        check_on_hub(path, "model", "model.path: ")
    try:
        file = Path(str(cached_file(path, CONFIG_NAME, local_files_only=local_files_only)))
        raw = read_config_file(file)
        states = [(other.name, other.lstat()) for other in file.parent.iterdir()]
    except OSError as error:
        raise UserError(f"model.path: {path}: no configuration can be read: {first_line(error)}") from None
    except ValueError as error:
        raise make_config_error(path, str(error)) from None
    state = (path, file.absolute(), raw, sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in states))
    if _latest.get("state") != state:
        description = ModelDescription(path, _make_config(path, raw, local_files_only))
        _latest.update(state=state, description=description)
    return _latest["description"]


_latest: dict[str, Any] = {}
"""The description that was read last, and the state of its files: a command works on one model."""


def _make_config(path: str, raw: dict[str, Any], local_files_only: bool) -> PretrainedConfig:
    """Make transformers' configuration from the contents of config.json, and check it."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        problem = "found no model_type, expected the name of an architecture; is this a Hugging Face model?"
        raise make_config_error(path, problem)
    if model_type not in CONFIG_MAPPING:
        raise make_config_error(
            path,
            f"model_type {model_type!r} is unknown to transformers {transformers.__version__}; {_EXPECTED} that is "
            "part of it (code of the model's repository, trust_remote_code, is not run)",
        )
    try:
        # Unless trust_remote_code is given, transformers asks at the terminal.
        config = AutoConfig.from_pretrained(path, local_files_only=local_files_only, trust_remote_code=False)
    except Exception as error:  # architectures validate their fields with exceptions of any class
        raise UserError(
            f"model.path: {path}: config.json does not describe a model of type {model_type!r}: {last_line(error)}"
        ) from None
    _check_kind(path, config)
    return config


def make_config_error(path: str, problem: str) -> UserError:
    """Make the error about a model's config.json."""
    return UserError(f"model.path: {path}: config.json: {problem}")


def _check_kind(path: str, config: PretrainedConfig) -> None:
    if config.model_type == "phimoe":
        # Without utilities no check compares gradients, which without jitter alone are wrong.
        kind = "an MoE model that estimates its router's gradient (SparseMixer) and draws experts at random in training"
    elif is_vision_language(config):
        if config.model_type in VISION_LANGUAGE:
            return
        kind = f"not among the vision-language models whose language model is trained ({', '.join(VISION_LANGUAGE)})"
    elif not config.is_encoder_decoder and _is_encoder(config):  # Musicgen has two text configurations
        kind = "an encoder, whose attention is not causal"
    elif config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "not a decoder-only language model"
    else:
        return
    raise make_config_error(path, f"model_type {config.model_type!r} is {kind}; {_EXPECTED}")


def _is_encoder(config: PretrainedConfig) -> bool:
    """Whether attention is bidirectional, by the model's type or by a field of its configuration."""
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return not getattr(config, "is_decoder", False)
    text = config.get_text_config()
    # Embedding models are decoders with one of these fields. Gemma 4's value "vision" leaves text causal.
    return not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all")


def _read_size(config: PretrainedConfig, name: str) -> int | None:
    """Return a size, None if the architecture does not have it, or has one per layer."""
    try:
        value = getattr(config.get_text_config(), name, None)
    except RuntimeError:  # transformers raises it if the size differs between layers
        return None
    return value if isinstance(value, int) else None


def is_vision_language(config: PretrainedConfig) -> bool:
    """Whether the language model is a part of a vision-language model, with a separate configuration."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config


def find_auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Return the auto class that loads the entire model: `AutoModelForCausalLM` loads only the language model of a
    vision-language model, or fails."""
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def find_causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that transformers loads."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_vision_language(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return cast(type[PreTrainedModel], mapping[type(config)])  # typed for mappings whose values may be pairs


def can_replace_attention(config: PretrainedConfig) -> bool:
    """Whether the architecture's attention can be replaced by that of `vcore_ds.models.attention`.

    It must look up its attention function by name, and use only causal masks and sliding windows, no chunks and no
    sparse attention with masks computed from the data.
    """
    causal_lm = find_causal_lm_class(config)
    # Hybrids of attention and recurrences look up names without setting `_supports_attention_backend`.
    finds_by_name = causal_lm._supports_attention_backend or hasattr(
        sys.modules[causal_lm.__module__], "ALL_ATTENTION_FUNCTIONS"
    )
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return finds_by_name and set(layer_types) <= ATTENTION_LAYERS | OTHER_LAYERS


def resolve_attention(config: PretrainedConfig, attention: str) -> str:
    """Resolve `model.attention: auto` to our attention if it can replace the architecture's, else `sdpa` or `eager`;
    other names are Hugging Face's and stay as they are."""
    if attention != "auto":
        return attention
    if can_replace_attention(config):
        return TRAINING_ATTENTION
    return "sdpa" if find_causal_lm_class(config)._supports_sdpa else "eager"


def build_empty_model(
    path: str, config: PretrainedConfig, *, attention: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build a model on the meta device; takes tenths of a second for 32B parameters. `attention`: name of the attention
    implementation, `dtype`: of its weights; None for the architecture's own. Raises UserError if no model can be built
    from the configuration."""
    options = {"attn_implementation": attention} | ({} if dtype is None else {"dtype": dtype})
    try:
        with torch.device("meta"):
            # A copy: transformers writes the attention into the configuration, which is shared.
            return find_auto_class(config).from_config(deepcopy(config), **options)
    except Exception as error:  # any class: architectures use sizes and names from config.json unchecked
        problem = f"{type(error).__name__}: {last_line(error)}"
        raise make_config_error(path, f"no {config.model_type} can be built from its values: {problem}") from None


def find_file(path: str, name: str) -> Path | None:
    """Find a file of a model's folder, or of its repository on the hub, which may download it; None without one."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


@contextmanager
def refuse_unreadable_model(path: str) -> Iterator[None]:
    """Context that turns exceptions of reading a model's files into UserError."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, ImportError, SafetensorError) as error:
        raise UserError(f"model.path: {path}: no causal language model can be loaded: {first_line(error)}") from None
