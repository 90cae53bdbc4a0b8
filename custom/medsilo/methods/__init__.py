"""The federated methods, one file for each method; `medsilo.registry` lists their names."""
