"""The final answer in a text."""

import re

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character: `\\{` is text."""


def answer_spans(text: str) -> list[tuple[int, int]]:
    r"""Ranges of characters between the braces of every `\boxed{...}`, nested braces included; unclosed ones are left
    out. One pass, however many boxes are never closed."""
    boxes = {boxed.end() for boxed in _BOXED.finditer(text)}
    if not boxes:
        return []
    spans, open_braces = [], []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            open_braces.append(brace.end())
        elif brace.group() == "}" and open_braces and (begin := open_braces.pop()) in boxes:
            spans.append((begin, brace.start()))
    return sorted(spans)


def last_code_block(text: str) -> str | None:
    """What stands between the last two lines that begin with three backticks, as LiveCodeBench takes it; None where
    there are not two."""
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else None
