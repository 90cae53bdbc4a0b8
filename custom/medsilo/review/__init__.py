"""Evidence for a hospital's review of this build: what is installed, what leaves, which claims a test has shown."""
