"""What NVFlare lacks on lines that break and with senders that misbehave; of use to any NVFlare application."""
