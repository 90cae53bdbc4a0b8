"""Measure medsilo's costs, and print each as a ratio to a stated reference. This file makes the folder a package,
because other distributions install a package of the same name.
"""
