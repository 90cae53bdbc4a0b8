"""Tools for researchers, for lead investigators and for people who try medsilo for the first time. NVFlare jobs at
hospitals never import this package.
"""
