"""Tasks of a plan: a task reads cases, and names the default network, the loss and the metric. This package also
divides one data set among simulated hospitals, and generates synthetic hospitals.
"""
