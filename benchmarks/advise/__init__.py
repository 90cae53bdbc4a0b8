"""The adviser's proof: federations with known shifts, on some of which rules were made and on others tried."""
