"""Describe a study as data: its phases of rounds, the groups of tensors that are exchanged, and its outcome."""
