"""The papers' data sets and networks, and the test of whether models tell who was in their training set."""
