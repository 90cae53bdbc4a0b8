"""Define the description of a study: its phases, the tensors that are exchanged in each phase, and its outcome."""
