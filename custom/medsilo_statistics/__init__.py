"""Exact statistics over hospitals before a study: counts, Table 1, survival curves and regressions, of sums alone."""
