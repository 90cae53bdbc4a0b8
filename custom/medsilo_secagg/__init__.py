"""Aggregate the updates of sites so that the server only learns the sum of the updates
(docs/trust/secure-aggregation.md).
"""
