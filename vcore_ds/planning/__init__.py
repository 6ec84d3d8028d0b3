"""Batches, memory, bytes and seconds of a recipe on its ranks, and DeepSpeed's JSON. Imports no torch."""
