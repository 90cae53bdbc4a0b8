"""Methods: one file each. Their names are in `medsilo.registry`."""
