"""Shared by all packages: errors, progress, paths, locks, text, random streams."""
