"""Prompts, answers, and whether an answer is right: one place for training data and evaluation."""
