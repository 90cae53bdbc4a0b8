"""Benchmarks. A package, because Opacus installs one of the same name, which would hide a plain folder."""
