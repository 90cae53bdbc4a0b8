"""Networks: MONAI's where it has them, and the papers' others. Their names are in `medsilo.registry`."""
