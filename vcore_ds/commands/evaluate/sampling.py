"""How answers are drawn: the model's own settings, the paper's, or what the command line says."""

import json
from dataclasses import dataclass, replace
from typing import Any

PAPER_MAX_NEW_TOKENS = 8_192
"""Table "Inference hyperparameters" of the paper."""


@dataclass(frozen=True)
class Sampling:
    """Every field that decides how a token is drawn, so that none is left to a server's defaults."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 for all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 42

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


PAPER = Sampling()
"""Greedy; the table's top_p 1.0, top_k -1 and seed 42."""


def model_sampling(base: str) -> Sampling:
    """What the model's generation_config.json recommends; greedy where it recommends no sampling.

    Its repetition penalty is left out: it belongs to short chats, and grading what a model says differs with it.
    """
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    path = cached_file(base, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return Sampling()
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    if not found.get("do_sample"):
        return Sampling()
    return Sampling(
        temperature=float(found.get("temperature") or 1.0),
        top_p=float(found.get("top_p") or 1.0),
        top_k=int(found.get("top_k") or -1),
        min_p=float(found.get("min_p") or 0.0),
    )


def choose_sampling(base: str, preset: str | None, changes: dict[str, Any]) -> Sampling:
    """The preset's or else the model's settings, with what `changes` names and is not None."""
    sampling = PAPER if preset == "paper" else model_sampling(base)
    return replace(sampling, **{name: value for name, value in changes.items() if value is not None})
