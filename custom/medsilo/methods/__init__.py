"""The federated methods, one file for each method; `medsilo.registry` lists the names of the methods."""
