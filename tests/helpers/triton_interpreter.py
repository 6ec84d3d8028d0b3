"""Triton's interpreter, a quarter faster."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once_a_launch() -> None:
    """Let only a kernel's launch replace the functions of Triton's language.

    Triton 3.7.1 looks for functions to replace in each call of a function by a kernel as well, where none is left.
    """
    patch_language = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch_language(function)
        return None  # a launch, whose patches end with it, never comes here

    interpreter._patch_lang = patch_once
