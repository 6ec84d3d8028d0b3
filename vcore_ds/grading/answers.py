"""The final answer in a text."""

import re

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
