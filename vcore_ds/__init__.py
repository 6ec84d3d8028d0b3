"""VCORE: supervised fine-tuning in which every token is weighted by what learning it is worth."""

__version__ = "0.7.0"
