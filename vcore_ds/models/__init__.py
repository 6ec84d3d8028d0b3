"""Models: loading, low-rank adapters, per-token losses, attention of all passes, sequence parallelism."""
