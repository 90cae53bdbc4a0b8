"""Read medsilo's version from the metadata of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("medsilo")
except PackageNotFoundError:  # medsilo's code may be on Python's path although medsilo is not installed
    __version__ = "0"
