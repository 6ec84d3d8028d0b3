"""Chat data: reading, tokens with supervision, the training order, batches. No collectives; the same on all ranks."""
