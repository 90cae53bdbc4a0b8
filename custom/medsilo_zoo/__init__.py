"""Methods beyond those that the papers of HarmoFL, AdaFed and FedSM compare with, written as an outsider would."""
