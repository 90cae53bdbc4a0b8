"""The data sets and networks of the papers on HarmoFL, AdaFed and FedSM."""
