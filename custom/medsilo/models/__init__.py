"""The networks of medsilo, some of which come from MONAI; the module `medsilo.registry` lists the names of the
networks.
"""
