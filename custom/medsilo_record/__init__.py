"""The record of a study at one hospital that a data protection officer can file, made from what medsilo knows."""
