"""The papers' data sets and networks."""
