"""Engines that run a whole federation on one machine: in this process, or in NVFlare's simulator."""
