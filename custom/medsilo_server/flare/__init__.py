"""Run the server of a study in NVFlare. The modules of this package are components of the job or of the server's
startup kit.
"""
