"""Run the server of a study in NVFlare. The modules are components of the job or of the server's startup kit."""
