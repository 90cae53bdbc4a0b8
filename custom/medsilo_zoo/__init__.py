"""Methods that the papers of HarmoFL, AdaFed and FedSM do not compare; they use only the interface for plug-ins."""
