"""Run folder, checkpoint folder, model folder, lock: each file whole or not there."""
