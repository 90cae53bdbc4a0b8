"""Attacks on what the documents promise, over the real path: each was successful once."""
