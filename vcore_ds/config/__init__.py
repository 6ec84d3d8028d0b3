"""Recipes: schema, rules, YAML, fragments and overrides. Nothing here imports torch."""
