"""The commands of `vcore-ds`, a file or folder each.

A command is a module with `HELP` and `DESCRIPTION`, `add_arguments(parser)` and `main(arguments)`. It is imported for
every call of `vcore-ds`, so what takes seconds to import (torch, transformers, deepspeed) is imported inside `main`.
No command imports another.
"""
