# Two commands do what most people want: `make demo` and `make test`. Each makes .venv when it is missing.
#
#   make demo      set up, build the default models, embed, rerank, generate, kill a worker on purpose
#   make help      this page
#   make test      set up and pass every test that this machine can run
#   make clients   clients of other people (openai, cohere, …) and a browser against `synapse serve`
#   make ray       bulk embedding on Ray, on this machine
#   make lint      ruff, mypy --strict, import contracts
#   make lock      resolve the newest versions for every supported Python and write constraints.txt
#   make wheel     an sdist and a wheel in dist/
#   make doctor    what this machine can run and what is wrong with it
#   make certify   certify every lane that this machine can run; documents under evidence/, README's table made anew
#   make faults    the fault campaign R1 to R17 (under six minutes): a table and reports/faults.json
#   make faults-nightly   the same with the big numbers and the soak
#   make mutants   does a test notice when the wire or a policy is changed? (SAMPLE=40: so many changes a module)
#   make coverage  branch coverage of the protocol and the host's policy by their own tests: 95 % at least
#   make bench     the benchmark suite: a table, reports/bench.json and reports/bench.html (QUICK=1: under 3 minutes)
#   make figures   what each default model does in a second here, into README
#   make bench-rivals   install what it is compared with into .venv-rivals and .venv-infinity (torch twice: large)
#   make goldens   recompute the golden files (needs torch and transformers in .venv-reference)
#   make rehearse-cuda   the CUDA lane on stub libraries, every family, precision and compute capability (no GPU)
#   make hw-cuda   hardware tests on an NVIDIA GPU, at most eight minutes; fails rather than skips without one
#   make hw-ane    hardware tests on the Apple Neural Engine; fails rather than skips without one
#   make hw-mac-cpu   the Core ML binding on the CPU of any Apple-silicon machine; fails rather than skips elsewhere
#   make hw-metal  hardware tests on Metal; fails rather than skips without it
#
# PYTHON=/path/to/python3.13 makes .venv with that Python (3.11 to 3.13), VENV=folder puts it elsewhere.

VENV ?= .venv
export VENV
ifeq ($(OS),Windows_NT)
  BIN := $(VENV)/Scripts
else
  BIN := $(VENV)/bin
endif
REFERENCE ?= .venv-reference/bin/python
GOLDENS := $(wildcard tests/*/make_goldens.py)

POLICY := errors placement.matrix placement.select residency.core supervision.quarantine supervision.queueing \
  text.limits worker.handshake worker.output worker.watchdog

.PHONY: help figures setup demo test clients ray lint lock wheel doctor certify faults faults-nightly coverage mutants bench bench-rivals goldens \
  hw-cuda hw-ane hw-metal rehearse-cuda hw-mac-cpu

setup:
	@$(or $(PYTHON),python3) scripts/setup.py

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: setup
	@$(BIN)/python -m synapse_host demo

test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadfile

clients: setup
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[clients,browser]'
	@$(BIN)/python -m pytest tests/serve/clients tests/serve/test_page.py

ray: setup
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray]'
	@$(BIN)/python -m pytest -m ray tests/bulk

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

lock:
	@$(or $(PYTHON),python3) scripts/lock.py

wheel: setup
	@$(BIN)/python -m build --outdir dist

doctor: setup
	@$(BIN)/python -m synapse_host doctor

figures: setup
	@$(BIN)/python -m bench.figures --write

certify: setup
	@$(BIN)/python -m synapse_host models install minilm ms-marco smollm2
	@$(BIN)/python -m synapse_host certify --all; code=$$?; $(BIN)/python scripts/status_table.py --write; exit $$code

faults: setup
	@$(BIN)/python -m tests.faults.campaign

faults-nightly: setup coverage
	@$(BIN)/python -m tests.faults.campaign --size nightly --report reports/faults-nightly.json
	@$(BIN)/python -m pytest -m soak tests/serve/test_kills.py

mutants: setup
	@$(BIN)/python -m pip install --quiet -e '.[mutation]'
	@$(BIN)/python -m tests.faults.mutants $(if $(SAMPLE),--sample $(SAMPLE))

coverage: setup
	@$(BIN)/python -m pytest -q --cov-branch --cov-fail-under=95 --cov=engines.protocol tests/protocol
	@$(BIN)/python -m pytest -q --cov-branch --cov-fail-under=95 $(POLICY:%=--cov=synapse_host.%) \
	  tests/host/test_errors.py tests/placement tests/residency tests/supervision tests/text/test_limits.py tests/worker

bench: setup
	@$(BIN)/python -m synapse_host bench --out reports $(if $(QUICK),--quick)

bench-rivals: setup
	@test -x .venv-rivals/bin/python || $(BIN)/python -m venv .venv-rivals
	@.venv-rivals/bin/python -m pip install --quiet $$($(BIN)/python scripts/rivals.py rivals)
	@test -x .venv-infinity/bin/python || $(BIN)/python -m venv .venv-infinity
	@.venv-infinity/bin/python -m pip install --quiet $$($(BIN)/python scripts/rivals.py rivals-infinity)
	@echo "rivals are in .venv-rivals and .venv-infinity; make bench compares with them"

goldens:
	@for script in $(GOLDENS); do echo "$$script"; $(REFERENCE) $$script || exit 1; done

rehearse-cuda: setup
	@$(BIN)/python -m pytest -m "soak or not soak" tests/rehearsal

hw-cuda: setup
	@$(BIN)/python -m pytest -m cuda --hw=cuda --session-timeout=470 tests/hardware

hw-ane: setup
	@$(BIN)/python -m pytest -m ane --hw=ane tests/hardware

hw-mac-cpu: setup
	@$(BIN)/python -m pytest -m mac-cpu --hw=mac-cpu tests/hardware

hw-metal: setup
	@$(BIN)/python -m pytest -m metal --hw=metal
