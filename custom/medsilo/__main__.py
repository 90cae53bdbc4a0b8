"""Start medsilo's command line when a user runs `python -m medsilo`."""

import sys

from medsilo.cli import main

if __name__ == "__main__":
    sys.exit(main())
