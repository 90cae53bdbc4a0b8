"""Run the command line with `python -m medsilo`."""

import sys

from medsilo.cli import main

if __name__ == "__main__":
    sys.exit(main())
