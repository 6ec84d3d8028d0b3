"""Models: loading, LoRA adapters, per-token losses, attention, MoE layers, sequence and tensor parallelism."""
