"""Read the version of the installed medsilo from its package's metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("medsilo")
except PackageNotFoundError:  # medsilo is on Python's path without being installed
    __version__ = "0"
