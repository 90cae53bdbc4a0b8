"""Attacks on the documented promises, over the real path. Each attack once succeeded."""
