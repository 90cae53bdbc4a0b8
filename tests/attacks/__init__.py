"""Attack the documented promises through the same code that a hospital and a server run. Each attack succeeded against
an earlier version.
"""
