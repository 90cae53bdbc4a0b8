"""Measure medsilo's costs, and print each as a ratio to a stated reference. The file exists because other distributions
install a package of the name `benchmarks`.
"""
