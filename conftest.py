"""Read before tests/conftest.py, which imports all that tests need and then looks for garbage again."""

import gc

gc.disable()  # the search for garbage in what is imported is a third of the imports' time
