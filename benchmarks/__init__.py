"""Measurements that print ratios against a stated reference. This file makes the folder a package, because other
distributions install a package of the same name.
"""
