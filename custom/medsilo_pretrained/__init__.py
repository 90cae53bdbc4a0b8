"""Networks that the package medsilo lacks: networks of papers, transformers, and networks that start from a checkpoint.
A network of this package may train only some of its tensors; frozen tensors are not sent.
"""
