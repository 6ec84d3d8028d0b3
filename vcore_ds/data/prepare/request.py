"""Requests to `vcore-ds prepare`, and comparison with the request that made a store."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import code_prompt, math_prompt
from vcore_ds.data.conversations import Supervise
from vcore_ds.data.prepare import curation
from vcore_ds.data.prepare.sources import Shard, describe_source
from vcore_ds.data.store import MANIFEST, describe_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["math", "code", "chat"]

SPLITS = {"math": "cot", "code": "cpp", "chat": "train"}
"""Default split of hub data."""
HUB_IDS = {"math": "nvidia/OpenMathReasoning", "code": "nvidia/OpenCodeReasoning-2"}
"""Default sources."""

_ROWS_VERSION = 2
"""How rows of conversations are read. 1 dropped `tools`, calls, and the weights of messages."""


@dataclass(frozen=True)
class PrepareRequest:
    """Everything that determines the bytes of the store."""

    kind: Kind
    sources: tuple[str, ...]
    """files, folders, patterns, or ids on the hub"""
    tokenizer: str
    """folder or hub id of the model to train"""
    split: str
    """split of data sets on the hub"""
    sample: int | None = None
    """sequences to keep, chosen at random; None for all"""
    seed: int = 42
    cutoff_length: int = 16384
    """tokens; longer sequences are dropped or truncated"""
    overlong: Literal["drop", "truncate"] = "drop"
    supervise: Supervise = "all"
    """turns of the assistant that are learned, of chat data"""
    answer_seconds: int = 5
    """CPU seconds for comparing one answer"""
    statements: str | None = None
    """folder with the problem statements that OpenCodeReasoning-2 refers to; None for the hub"""


def describe_origin(
    request: PrepareRequest, raw_shards: Sequence[Shard], tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Any]:
    """The manifest's entries on a store's origin; the same origin gives the same content."""
    filters = _filters(request)
    return {
        "kind": request.kind,
        "source": describe_source(raw_shards),
        "tokenizer": describe_tokenizer(tokenizer),
        "filters": filters,
        "filters_hash": hashlib.sha256(json.dumps(filters, sort_keys=True).encode()).hexdigest(),
        "seed": request.seed,
    }


def check_finished(output: Path, origin: dict[str, Any]) -> None:
    """Raise UserError where `output` is no store, or a store of another origin."""
    remedy = "name another --output, or delete it"
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{output}: is there already and is no token store; {remedy}") from None
    filters, expected_filters = manifest.get("filters", {}), origin["filters"]
    if filters.get("rows_version", 1) != expected_filters.get("rows_version", 1):
        raise UserError(
            f"{output}: found a store made by an earlier version of vcore_ds, which dropped `tools`, calls and weights "
            f"of messages; prepare it again: {remedy}"
        )
    for key, value in origin.items():
        if manifest.get(key) != value:
            raise UserError(
                f"{output}: found a store made with another {key}: {_shorten(manifest.get(key))}, expected "
                f"{_shorten(value)}; {remedy}"
            )


def _filters(request: PrepareRequest) -> dict[str, Any]:
    """Everything besides data, tokenizer and seed that determines the store's content."""
    filters: dict[str, Any] = {key: getattr(request, key) for key in ("split", "sample", "cutoff_length", "overlong")}
    if request.kind == "chat":
        filters |= {"supervise": request.supervise, "rows_version": _ROWS_VERSION}
    if request.kind == "math":
        filters |= {
            "prompt": math_prompt("{ORIGINAL QUESTION}"),
            "rules": [curation.OTHER_PROBLEM_TYPE, curation.OTHER_MODEL, curation.NOT_EQUIVALENT],
            "answer_seconds": request.answer_seconds,
            "math_verify": version("math-verify"),
        }
    if request.kind == "code":
        filters |= {
            "prompt": code_prompt("{ORIGINAL QUESTION}"),
            "rules": [curation.NOT_RIGHT],
            "statements": request.statements,
        }
    return filters


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
