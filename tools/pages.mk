# Pictures and words of the pages. The Makefile includes this file.

# Pictures of the README and the pages, from synthetic hospitals, by a Chromium of this machine.
screenshots: $(VENV)/.demo-ready
	$(BIN)/python -m tools.screenshots

# 100 sentences of pages, help, messages and templates to read aloud, and those that are too long or say too little.
words: $(VENV)/.demo-ready
	$(BIN)/python -m tools.words --seed $(SEED)
