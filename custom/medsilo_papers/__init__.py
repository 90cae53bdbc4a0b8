"""The data sets of the papers on HarmoFL, AdaFed and FedSM."""
