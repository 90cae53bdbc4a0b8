"""Run the server of a study in NVFlare. The modules are NVFlare components of the job and of the server's startup kit.
"""
