# Benchmarks. The Makefile includes this file.

# With a dash, a benchmark that misses its bound does not stop the other benchmarks.
bench: export MEDSILO_RATIOS = build/ratios.jsonl
bench: $(VENV)/.test-ready
	mkdir -p build && rm -f $(MEDSILO_RATIOS)
	-$(BIN)/python benchmarks/mixing.py
	-$(BIN)/python benchmarks/sealing.py
	-$(BIN)/python benchmarks/adafed.py
	-$(BIN)/python benchmarks/federation.py
	-$(BIN)/python benchmarks/harmofl.py
	-$(BIN)/python benchmarks/privacy.py
	-$(BIN)/python benchmarks/fedsm.py
	-$(BIN)/python benchmarks/data.py
	-$(BIN)/python benchmarks/data_sets.py
	-$(BIN)/python benchmarks/augmentation.py
	-$(BIN)/python benchmarks/volumes.py
	-$(BIN)/python -m benchmarks.nnunet
	-$(BIN)/python -m benchmarks.networks

# Compare the ratios of the last 'make bench', or of the cheap benchmarks without such a run, with the last release's.
bench-history: $(VENV)/.test-ready
	$(BIN)/python -m benchmarks.history
