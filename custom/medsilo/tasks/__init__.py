"""Define the tasks of plans: a task reads cases, and names the default network, the loss and the metric."""
