"""Measure medsilo's costs, and print each cost divided by the cost of a stated reference. This file makes the folder a
package, because otherwise another installed package with the name `benchmarks` could be imported.
"""
