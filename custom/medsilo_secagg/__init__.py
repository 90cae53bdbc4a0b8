"""Secure aggregation: the server adds numbers that it cannot read (docs/trust/secure-aggregation.md)."""
