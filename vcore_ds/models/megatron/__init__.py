"""Dense decoders with tensor parallelism from megatron-core's layers (`parallel.tensor`).

Not imported by `vcore_ds.models`: importing megatron-core takes seconds.
"""
