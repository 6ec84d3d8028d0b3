"""Models: loading, low-rank adapters, per-token losses, attention of all passes, rows that ranks share."""
