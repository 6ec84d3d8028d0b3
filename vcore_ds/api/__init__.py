"""The public Python API, see docs/python.md; `vcore_ds/__init__.py` lists its names."""
