# Every target sets up what it needs in .venv first (once; again when pyproject.toml or constraints.txt change).
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer, for the versions in constraints.txt)
#   PIP_FLAGS=…         more options for pip, such as an index with CPU builds of torch
#   VENV_FLAGS=…        more options for venv, such as --system-site-packages
#   CONSTRAINTS=        empty: take what satisfies pyproject.toml instead of the pinned versions
#   SETUP=no            no .venv at all: run with $(PYTHON) and what it has
#   ARGS=…              more arguments for the tool that the target runs
#   WORKERS=…           how many processes share the tests out; empty: pytest alone, which needs no pytest-xdist

PYTHON ?= python3
SETUP ?= yes
CONSTRAINTS ?= -c constraints.txt
# Three, however many cores there are: a test of many ranks waits most of its time, and uses several of them when it does not.
WORKERS ?= 3
VENV := .venv
STAMP := $(VENV)/.set-up

ifeq ($(SETUP),no)
READY :=
RUN := $(PYTHON)
COMMLAYER := $(PYTHON) -c 'from commlayer.cli.main import main; main(prog_name="commlayer")'
else
READY := $(STAMP)
RUN := $(VENV)/bin/python
COMMLAYER := $(VENV)/bin/commlayer
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test fence test-torch test-gpu gpu trainers conformance lint lint-types lint-style lint-imports lint-documentation docs docs-serve bench bench-collectives bench-groups bench-replan bench-noise bench-switch-faults bench-stale-start bench-moe bench-compressed bench-codecs bench-lanes bench-overlap bench-micro-batches bench-mappings bench-placement bench-placement-faults bench-placement-losses bench-placement-steps bench-deaths bench-sites bench-trainers papers published clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-23s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make .venv with everything that development needs

# The stamp is the last thing written, so a set-up that fails or is interrupted is done again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $(STAMP)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("development needs Python 3.11 or newer, " \
	  + sys.executable + " is " + sys.version.split()[0] + ": name another with make PYTHON=…")'
	@echo "Setting up $(VENV): torch and the tools, some minutes on a new machine"
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) \
	  || { echo "$(PYTHON) cannot make virtual environments (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) $(CONSTRAINTS) -e '.[dev]'
	@touch $(STAMP)

demo: $(READY)  ## measure, plan and run on an emulated cluster; writes a report
	$(COMMLAYER) demo $(ARGS)

test: $(READY)  ## all tests, or some: ARGS="tests/integrations/moe -k router"; what fails runs once more, alone; those that need a GPU skip without one
	$(RUN) -m pytest --second-try $(if $(WORKERS),-n $(WORKERS) --dist worksteal) $(ARGS)

fence: $(READY)  ## what a refactoring must leave as it was, every case; ARGS="decisions" one section (CONTRIBUTING.md)
	$(RUN) tests/fence/fence.py $(ARGS)

# An environment beside .venv: the pinned versions but for torch, and for triton, which torch chooses.
TORCH_VENV = .venv-torch-$(VERSION)
TORCH_TESTS = tests/backend tests/engine tests/transport tests/agree tests/failures tests/diagnosis

test-torch:  ## the runtime's tests with another release of torch: VERSION=2.15.0; makes an environment for it first
	@test -n "$(VERSION)" || { echo "name a release of torch: make test-torch VERSION=2.15.0" >&2; exit 2; }
	@test -e $(TORCH_VENV)/.set-up || { \
	  echo "Setting up $(TORCH_VENV): a CUDA build of torch is some gigabytes" \
	  && $(PYTHON) -m venv $(TORCH_VENV) \
	  && grep -vE '^(torch|triton)==' constraints.txt > $(TORCH_VENV)/constraints.txt \
	  && $(TORCH_VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) -c $(TORCH_VENV)/constraints.txt torch==$(VERSION) \
	    -e '.[emulation]' expecttest hypothesis pytest pytest-timeout pytest-xdist \
	  && touch $(TORCH_VENV)/.set-up; }
	$(TORCH_VENV)/bin/python -m pytest --second-try $(if $(WORKERS),-n $(WORKERS) --dist worksteal) $(or $(ARGS),$(TORCH_TESTS))

test-gpu: $(READY)  ## the tests that need a CUDA device, with the reason where they skip
	@$(RUN) -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name() if torch.cuda.is_available() \
	  else "a machine WITHOUT a CUDA device: every test below skips and nothing is tested")'
	$(RUN) -m pytest tests/gpu -m gpu -rs $(ARGS)

gpu: $(READY)  ## all that one GPU can show, in some minutes: tests, sanitizer, kernels, host cost; a dated result
	$(RUN) benchmarks/gpu.py $(ARGS)

trainers: $(READY)  ## all tests of trainers, also those that `make test` leaves out; one that skips is a failure
	$(RUN) -m pytest tests/trainers --every-variant $(ARGS)

conformance: $(READY)  ## PyTorch's own DistributedTest suite on the backend, compared with Gloo; some minutes
	$(RUN) tests/conformance/driver.py $(ARGS)

lint: $(READY)  ## style, format, types, import contracts, documentation
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint-types lint-style lint-imports lint-documentation docs

lint-types: $(READY)
	$(RUN) -m mypy

lint-style: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

lint-imports: $(READY)
	$(RUN) -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))'

lint-documentation: $(READY)
	$(RUN) -m pytest -q tests/test_documentation.py

# The variable silences a notice about the theme's successor. Not --quiet: that hides warnings from --strict too.
docs: $(READY)  ## the documentation as a site, in site/; a link to nothing is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-serve: $(READY)  ## the same on http://127.0.0.1:8000, built anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve $(ARGS)

bench-collectives: $(READY)  ## the backend's collectives against torch's on Gloo; writes a dated result document
	$(RUN) benchmarks/collectives.py $(ARGS)

bench-groups: $(READY)  ## collectives of a trainer's groups: how good the chosen plans are, and against torch's; writes a dated document
	$(RUN) benchmarks/groups.py $(ARGS)

bench-replan: $(READY)  ## a card changes its rate while a job runs: after how many calls plans change, and what they are worth then
	$(RUN) benchmarks/replan.py $(ARGS)

bench-stale-start: $(READY)  ## jobs that start with a profile of slower or faster links: what their calls take after two seconds
	$(RUN) benchmarks/stale_start.py $(ARGS)

bench-noise: $(READY)  ## ten minutes of busy cores and wandering latency: how often plans change though no link has
	$(RUN) benchmarks/noise.py $(ARGS)

bench-switch-faults: $(READY)  ## ranks killed, stopped or slow, and the store lost, at every stage of a switch of plans, in 300 jobs
	$(RUN) benchmarks/switch_faults.py $(ARGS)

bench-moe: $(READY)  ## the MoE layer against plain calls and DeepSpeed's; writes a dated result document
	$(RUN) benchmarks/moe.py $(ARGS)

bench-compressed: $(READY)  ## collectives in BF16 and FP8 against native ones; writes a dated result document
	$(RUN) benchmarks/compressed.py $(ARGS)

bench-codecs: $(READY)  ## encoding and decoding on one core against plain torch expressions; writes a dated result document
	$(RUN) benchmarks/codecs.py $(ARGS)

bench-lanes: $(READY)  ## an expert all_to_all beside gradients, and a whole step, with lanes and without; writes dated documents
	$(RUN) benchmarks/lanes.py $(ARGS)
	$(RUN) benchmarks/lanes_step.py

bench-overlap: $(READY)  ## the MoE layer with emulated accelerators: how much of its exchanges is hidden; writes a dated document
	$(RUN) benchmarks/overlap.py $(ARGS)

bench-micro-batches: $(READY)  ## two micro-batches at a time in a pipeline, with emulated accelerators; writes a dated document
	$(RUN) benchmarks/micro_batches.py $(ARGS)

bench-mappings: $(READY)  ## steps of a small model on 16 mappings, against the simulated step; writes a dated document
	$(RUN) benchmarks/mappings.py $(ARGS)

bench-placement: $(READY)  ## placing experts: how long a solution takes, and what it is predicted to gain; writes a dated document
	$(RUN) benchmarks/placement.py $(ARGS)

bench-placement-steps: $(READY)  ## steps under skewed routing, experts in order, by EPLB's placement and ours, with emulated accelerators; writes a dated document
	$(RUN) benchmarks/placement_steps.py $(ARGS)

bench-placement-losses: $(READY)  ## losses of 300 steps in which experts move, with copies and without; writes a dated document and a picture
	$(RUN) benchmarks/placement_losses.py $(ARGS)

bench-placement-faults: $(READY)  ## ranks killed while experts move, in 100 jobs: who hears of it, and whether the checkpoint before it loads
	$(RUN) benchmarks/placement_faults.py $(ARGS)

bench-deaths: $(READY)  ## ranks killed at random moments of 300 jobs: when, and how, the others hear of it
	$(RUN) benchmarks/deaths.py $(ARGS)

bench-sites: $(READY)  ## torchft's outer synchronisation between sites, against Gloo; eight minutes
	$(RUN) benchmarks/sites.py $(ARGS)

bench-trainers: $(READY)  ## steps of Megatron-Core, torchtitan and DeepSpeed, as they are on Gloo and with commlayer; writes a dated document
	$(RUN) benchmarks/trainers.py $(ARGS)

papers: $(READY)  ## the papers' tables, predicted, beside what they publish; writes docs/papers.md
	$(RUN) benchmarks/papers.py $(ARGS)

published: $(READY)  ## published training runs, predicted, beside what they publish; writes docs/published.md and what estimates are checked by
	$(RUN) benchmarks/published.py $(ARGS)

bench: $(READY)  ## measure every way of moving an all_to_all; writes a dated result document
	$(RUN) benchmarks/all_to_all.py $(ARGS)

clean:  ## remove .venv and everything that tools leave behind
	rm -rf $(VENV) .venv-torch-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
