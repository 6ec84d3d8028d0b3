"""What a recipe comes to on its ranks: batches, memory, bytes, seconds, DeepSpeed's JSON. Imports no torch."""
