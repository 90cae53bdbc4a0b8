"""Run the server's part of a study in NVFlare: the controller, its transport, and the files of the server's startup
kit.
"""
