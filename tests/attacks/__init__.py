"""Attacks on the documented promises, each of which succeeded against an earlier version of medsilo."""
