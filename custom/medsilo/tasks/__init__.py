"""Tasks: a data set with its network, loss and metric; partitions; synthetic hospitals. Names: `medsilo.registry`."""
