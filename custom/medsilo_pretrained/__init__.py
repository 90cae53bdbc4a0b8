"""Start networks from a checkpoint, and train only some of their tensors. Frozen tensors are not sent."""
