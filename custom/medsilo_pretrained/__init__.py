"""Start networks from a checkpoint and train only a part of them. Frozen parts are not sent."""
