"""Federated methods that the papers of HarmoFL, AdaFed and FedSM do not compare; the methods use only medsilo's
interface for plug-ins.
"""
