"""Measurements that print ratios against a stated reference in the same run."""
