"""Compare methods over several runs, reuse earlier runs, and run the demo."""

USUAL_SEEDS = (0, 1, 2, 3)  # default seeds of a comparison, on the command line and in Python
