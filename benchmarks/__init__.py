"""Measurements that print ratios against a stated reference. A package: others install one of the same name."""
