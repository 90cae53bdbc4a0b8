"""What researchers, leads and newcomers use. No hospital's job imports any of it."""
