"""The final answer in a text, and the supervision that keeps little else (the method `random`)."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vcore_ds.method import random_mask

if TYPE_CHECKING:
    from vcore_ds.data.tokenization import Dataset, TokenizedSequence

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace, \\{, is text


def answer_spans(text: str) -> list[tuple[int, int]]:
    """Ranges of characters between the braces of every `\\boxed{...}`, nested braces included; unclosed ones are left
    out."""
    spans = []
    for boxed in _BOXED.finditer(text):
        depth = 1
        for brace in _BRACE.finditer(text, boxed.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                spans.append((boxed.end(), brace.start()))
                break
    return spans


def keep_random_tokens(dataset: "Dataset", keep_share: float, seed: int) -> "Dataset":
    """The dataset with `kept` set: all of the answer and a random part of the rest, `keep_share` of the supervised
    tokens in total. The dataset must have been made with `mark_answers`."""

    def keep(sequence: "TokenizedSequence") -> "TokenizedSequence":
        assert sequence.in_answer is not None
        kept = np.zeros(len(sequence), dtype=np.bool_)
        in_answer = sequence.in_answer[sequence.supervised]
        kept[sequence.supervised] = random_mask(in_answer, keep_share, seed, sequence.sequence_id)
        return replace(sequence, kept=kept)

    return replace(dataset, sequences=[keep(sequence) for sequence in dataset.sequences])
