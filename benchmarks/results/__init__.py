"""The files of results/ that compare methods: one command each, on the machinery of `medsilo compare`."""
