"""Dense decoders of megatron-core's parallel layers, each rank with a part of every layer (`parallel.tensor`).

Not imported with `vcore_ds.models`: megatron-core takes seconds to import.
"""
