"""Secure aggregation: the server adds up numbers that it cannot read. docs/secure-aggregation.md has the protocol."""
