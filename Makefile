# make demo   install into .venv, then train a small model on real text with two processes on the CPU
# make chat-demo   install into .venv, then teach a real model to look things up, with LoRA, on the CPU
# make test   install into .venv, then run the test suite
# make test TORCH=2.15.0   the same with that torch, in .venv-2.15.0
# make test-faults   kill, poison and damage runs; up to 15 minutes
# make lint   install into .venv, then check layout, mistakes, who imports whom, and types
PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))

CHAT_DEMO := outputs/chat_demo

.PHONY: demo chat-demo test test-faults test-gpu lint clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]" $(if $(TORCH),torch==$(TORCH))
	touch $@

demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 scripts/past_torchrun.sh $(VENV)/bin/torchrun --standalone --nproc-per-node 2 train.py --config train_configs/demo_cpu.toml

chat-demo: export OMP_NUM_THREADS = 1
chat-demo: TWO = $(VENV)/bin/torchrun --standalone --nproc-per-node 2
chat-demo: ANSWERS = $(TWO) -m examples.chat_demo answer --config train_configs/demo_chat.toml \
	--questions $(CHAT_DEMO)/chats/held_out.jsonl
chat-demo: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev,study]"
	$(VENV)/bin/python -m scripts.study.real_model --out outputs/smollm2
	$(VENV)/bin/python -m examples.chat_demo write $(CHAT_DEMO)/chats
	$(ANSWERS) --hf outputs/smollm2 --out $(CHAT_DEMO)/before.json
	$(TWO) train.py --config train_configs/demo_chat.toml
	$(ANSWERS) --checkpoint $(CHAT_DEMO)/run --out $(CHAT_DEMO)/after.json
	$(VENV)/bin/python -m examples.chat_demo compare $(CHAT_DEMO)/before.json $(CHAT_DEMO)/after.json

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m "not gpu and not slow and not faults" --numprocesses 3 \
		--dist loadfile --no-loadscope-reorder

test-faults: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m faults

test-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m gpu --numprocesses 12 --dist worksteal

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/mypy

clean:
	rm -rf .venv .venv-* outputs *.egg-info build
