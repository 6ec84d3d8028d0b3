"""What all rooms share: errors, progress, paths, locks, text, random streams."""
