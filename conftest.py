"""pytest reads this file first, so garbage collection is off while tests/conftest.py imports all modules that tests
need. Then tests/conftest.py switches garbage collection on.
"""

import gc
import sys
from typing import Any

gc.disable()  # garbage collection would take a third of the imports' time

# MONAI imports jsonschema, which imports the package rfc3987_syntax if this package is installed. Importing
# rfc3987_syntax takes a second, and no test needs this package.
missing: dict[str, Any] = {"rfc3987_syntax": None}
sys.modules.update(missing)
