"""Aggregate updates so that the server only learns their sum (docs/trust/secure-aggregation.md)."""
