"""The networks of medsilo, some of which come from MONAI. The module `medsilo.registry` lists their names."""
