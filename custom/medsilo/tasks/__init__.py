"""Tasks: each combines cases with a default network, a loss and a metric. Also partitions and synthetic hospitals."""
