"""Measurements that print ratios against a stated reference. A package: Opacus installs one of the same name."""
