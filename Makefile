# make demo   install into .venv, then train a small model on real text with two processes on the CPU
# make test   install into .venv, then run the test suite
# make test-faults   kill, poison and damage runs; up to 15 minutes
# make lint   install into .venv, then check layout, mistakes and who imports whom
PYTHON ?= python3
VENV := .venv

.PHONY: demo test test-faults test-gpu lint clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node 2 train.py --config train_configs/demo_cpu.toml

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m "not gpu and not slow and not faults" --numprocesses 3 \
		--dist loadfile --no-loadscope-reorder

test-faults: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m faults

test-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m gpu -p tests.gpu.untaken

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-cache --no-logo

clean:
	rm -rf $(VENV) outputs *.egg-info build
