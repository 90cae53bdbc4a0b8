"""A study as data: phases of rounds, in each the groups of tensors that travel, and at the end an outcome."""
