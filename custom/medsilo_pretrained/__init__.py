"""Further networks: those of papers, transformers, and networks that start from a checkpoint. Such a network may train
only some of its tensors; frozen tensors are not sent.
"""
