"""The networks of medsilo, some of which come from MONAI; the module `medsilo.registry` lists their names."""
