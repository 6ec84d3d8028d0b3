"""The arithmetic of a batch on many ranks: which share a row, what runs together, how long that takes. Pure Python."""
