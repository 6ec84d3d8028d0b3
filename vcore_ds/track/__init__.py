"""What is written down and printed about a run."""
