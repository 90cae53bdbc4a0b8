"""Templates for a plug-in: a small package with a working method, task or network, and with a test."""
