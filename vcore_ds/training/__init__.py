"""A run: its data, its steps in the order of Algorithm 1, its checkpoints and its result."""
