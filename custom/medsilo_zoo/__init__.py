"""More methods than the papers of HarmoFL, AdaFed and FedSM compare, written with the same interface as plug-ins."""
