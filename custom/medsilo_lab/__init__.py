"""Tools for researchers, lead investigators and newcomers. The package never runs in a hospital's NVFlare job."""
