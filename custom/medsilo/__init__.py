"""medsilo: hospitals train a medical-imaging model together without sharing data."""

__version__ = "0.1.0"
