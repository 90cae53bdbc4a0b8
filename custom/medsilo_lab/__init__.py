"""Tools for researchers, for lead investigators and for people who try medsilo for the first time. No NVFlare job at a
hospital imports this package.
"""
