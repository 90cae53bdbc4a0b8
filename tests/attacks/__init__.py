"""Attacks on medsilo's documented promises; each attack succeeded against an earlier version of medsilo."""
