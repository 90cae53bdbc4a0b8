"""Patch the handshake with which clients connect to a relay of NVFlare. `medsilo kits make` copies this file into the
folder local/ of a relay's kit, where NVFlare searches for drivers.

NVFlare imports this file before the relay accepts connections. If medsilo is not installed, the file changes nothing.
"""

from contextlib import suppress

with suppress(ImportError):
    from nvflare_reliability.kit_patches import shake_hands_apart
    from nvflare_reliability.patches import connect_in_time

    shake_hands_apart()
    connect_in_time()
