"""Networks that start from a checkpoint and train only a part. The frozen part does not travel."""
