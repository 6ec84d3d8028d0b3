"""Recipes: schema, YAML, overrides, batch arithmetic, the DeepSpeed JSON. Nothing here imports torch."""
