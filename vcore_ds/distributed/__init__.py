"""Ranks on named axes and their exchanges, process group, watchdog, stops, signals."""
