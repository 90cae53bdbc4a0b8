"""The start of a plug-in: a small package with a method, a task or a network that works, and its test."""
