"""The commands of `vcore-ds`, one file or folder each.

A command is a module with `HELP`, `DESCRIPTION`, `add_arguments(parser)` and `main(arguments)`. Every call of
`vcore-ds` imports all of them, so torch, transformers and deepspeed, which take seconds, are imported inside `main`.
"""
