"""Start networks from a checkpoint, and train only some of the tensors. Frozen tensors are not sent."""
