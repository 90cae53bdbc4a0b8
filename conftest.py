"""pytest reads this file before tests/conftest.py, which imports all modules that tests need and then switches garbage
collection on again.
"""

import gc
import sys
from typing import Any

gc.disable()  # a third of the time of the imports would be garbage collection

# MONAI imports jsonschema, and jsonschema imports a grammar of addresses if the grammar is installed. Importing the
# grammar takes a second, and no test needs the grammar.
missing: dict[str, Any] = {"rfc3987_syntax": None}
sys.modules.update(missing)
