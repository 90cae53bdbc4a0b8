"""Attacks on what the privacy pages promise, end to end: each was red before it was mended."""
