# Each target does all of its own set-up in .venv. PYTHON=python3.12 chooses the interpreter that .venv is made with.

MAKEFLAGS += --no-print-directory --no-builtin-rules
.NOTPARALLEL:
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
unexport PYTHONDONTWRITEBYTECODE# tests start Python hundreds of times
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PIP_ENV) $(PY) -m pip install -q
STAMPS := $(VENV)/stamps
EXTRAS := base test bench lint site release
with-base := build package cli# what building, the package and its command need, at once
with-test := test picture# all that its tests need
NATIVE := $(shell find ktmoe/_native -name '*.[ch]' -o -name '*.p[yx][xdi]') ktmoe/_native/isa.py
PROCESSES := -n 2 --dist loadfile# two; ARGS="-n 0" is one, as --pdb wants it
HOURS ?= 2
ARGS ?=# more arguments for pytest or the tool that a target runs

# .venv is made again where it does not run, and where PYTHON is given and is another version.
VERSION := -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'
HAVE := $(shell $(PY) $(VERSION) 2>/dev/null)
ifeq ($(origin PYTHON),undefined)
  PYTHON := python3
  WANT := $(HAVE)
else
  WANT := $(shell $(PYTHON) $(VERSION) 2>/dev/null)
endif

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMPS)/native ## write a layer, load, check and measure it; MODEL=dir LAYER=3 takes a real one
	@$(PY) -m ktmoe demo $(if $(MODEL),--model "$(MODEL)") $(if $(LAYER),--layer "$(LAYER)")

demo-chat: $(STAMPS)/native ## a model learns 100 answers about ktmoe in a minute, and gives them: first installs transformers; MODEL=dir PROMPT="..." takes a real one
	@$(PY) tools/demo_chat.py $(if $(MODEL),--model "$(MODEL)") $(if $(PROMPT),--prompt "$(PROMPT)")

test: ## every kind of check in at most 5 minutes on 2 cores, cases chosen by design; ARGS="-k pack" goes to pytest
verify: CASES := --exhaustive
verify: ## all cases of all tests, about 15 minutes on 2 cores; ARGS=--rest leaves out those of make test
test verify: $(STAMPS)/native $(STAMPS)/test $(STAMPS)/lint
	@$(PY) -m pytest -q $(PROCESSES) $(CASES) $(ARGS)
	@if grep -qw amx_tile /proc/cpuinfo; then \
	  echo 'ktmoe: amx again, emulated as on CPUs without it'; \
	  KTMOE_TEST_EMULATE_AMX=1 $(PY) -m pytest -q $(PROCESSES) $(CASES) $(ARGS); \
	fi

soak: $(STAMPS)/native $(STAMPS)/test ## a million hostile headers, thousands of random layers, hours of calls: as many as HOURS=2 gives time for
	@$(PY) -m pytest -q $(PROCESSES) --soak --hours=$(HOURS) $(ARGS)

sanitize: $(STAMPS)/native $(STAMPS)/test ## random calls of all native code under sanitizers, many threads, planted faults; ARGS=--soak for all cases
	@KTMOE_TEST_SANITIZE=1 $(PY) -m pytest -q -n 0 tests/sanitize $(ARGS)
mutants: $(STAMPS)/native $(STAMPS)/test ## 200 mistakes, each planted beside the tests of its own file: which are not found; ARGS="--only ktmoe/loaders/gptq.py --count 20 --seed 3"
	@$(PY) tools/mutants.py $(ARGS)

test-docs: $(STAMPS)/native $(STAMPS)/test ## commands and Python blocks of README and docs that need no other package; ARGS="-k linear"
	@$(PY) -m pytest -q -n 0 tests/test_pages.py tests/test_page_runs.py $(ARGS)

test-kt-kernel: $(STAMPS)/native $(STAMPS)/test ## kt-kernel itself beside ktmoe: first installs it; ARGS=--smoke is a few cases, for this and the next four
	@$(PY) tools/test_kt_kernel.py $(ARGS)

test-writers: $(STAMPS)/native $(STAMPS)/test ## loaders on what other projects' writers write: first installs those, about 5 minutes
	@$(PY) tools/test_writers.py $(ARGS)

test-engines: $(STAMPS)/native $(STAMPS)/test ## generating text in transformers and in vLLM: first installs them, about 8 minutes
	@$(PY) tools/test_engines.py $(PROCESSES) $(ARGS)

test-machines: $(STAMPS)/native $(STAMPS)/test ## one model in vLLM on two machines made of network namespaces: needs root, first installs vLLM, about 10 minutes
	@$(PY) tools/test_machines.py $(ARGS)

test-sglang: $(STAMPS)/native $(STAMPS)/test ## SGLang's own layer on ktmoe: first installs it, about 2 minutes
	@$(PY) tools/test_sglang.py $(ARGS)

test-pythons: $(STAMPS)/native $(STAMPS)/test ## building and testing on other CPythons, 3.12 to 3.14 and those without a GIL: about 25 minutes
	@$(PY) tools/test_pythons.py $(ARGS)

test-avx2: $(STAMPS)/native $(STAMPS)/test ## vLLM's tests in a QEMU guest without AVX-512: needs root, first installs QEMU and a kernel, over an hour without KVM; ARGS=lscpu runs that
	@$(PY) tools/avx2_guest.py $(ARGS)

test-numa: $(STAMPS)/native $(STAMPS)/test ## tests on two and four NUMA nodes in QEMU guests: needs root, first installs QEMU and a kernel, 10 to 20 minutes without KVM; ARGS="two -- lscpu" runs that in one
	@$(PY) tools/numa_guest.py $(ARGS)

bench: $(STAMPS)/native $(STAMPS)/bench ## the benchmarks, about 20 minutes on 2 cores, saved; ARGS="--full" is everything
	@$(PY) -m pytest -q bench --benchmark-quiet --benchmark-autosave -W ignore::pytest_benchmark.logger.PytestBenchmarkWarning $(ARGS)

bench-compare: $(STAMPS)/bench ## the last saved benchmarks against those before; ARGS="3 1": number 3 against number 1
	@$(PY) -m bench.compare $(ARGS)

bench-peers: $(STAMPS)/native $(STAMPS)/bench ## kt-kernel, ggml and torch beside ktmoe in 10 formats: first installs them, then about 50 minutes; ARGS="--formats 'GGUF Q2_K'" is one
	@$(PY) -m bench.peers run $(ARGS)

bench-linear: $(STAMPS)/native $(STAMPS)/bench ## dense matrices by ktmoe, torch and ggml: first installs them, then about 30 minutes
	@$(PY) -m bench.linear $(ARGS)

bench-engines: $(STAMPS)/native $(STAMPS)/bench ## text of whole models by ktmoe, transformers and llama.cpp: first installs them, then 3 hours; ARGS="--comparisons gguf"
	@$(PY) -m bench.engines run $(ARGS)

bench-vllm: $(STAMPS)/native $(STAMPS)/bench ## text by vLLM with the plug-in and without it, and servers beside llama.cpp's: first installs them, then about 40 minutes
	@$(PY) -m bench.vllm $(ARGS)

bench-distributed: $(STAMPS)/native $(STAMPS)/bench ## a layer on 1, 2 and 4 processes over several networks, beside a model of its time: first installs torch and mpi4py, then about 8 minutes
	@$(PY) -m bench.distributed $(ARGS)

bench-training: $(STAMPS)/native $(STAMPS)/bench ## a step of LoRA, forward and backward, by ktmoe, kt-kernel and torch: first installs them, then 10 minutes
	@$(PY) -m bench.training $(ARGS)

bench-graphs: $(STAMPS)/native $(STAMPS)/bench ## a decode step as a CUDA graph: on a GPU if torch has one, else what a replay adds, about a minute
	@$(PY) -m bench.graphs $(ARGS)

simulation: $(STAMPS)/native $(STAMPS)/bench ## layer calls simulated on up to 128 threads, into docs/simulation.md: about 15 seconds; ARGS=check measures
	@$(PY) -m bench.simulation $(ARGS)

results: $(STAMPS)/native $(STAMPS)/bench ## the last saved benchmarks into bench/results and docs; ARGS="7": number 7; ARGS=--show prints all tables
	@$(PY) -m bench.publish $(ARGS)

wheel: $(STAMPS)/base $(STAMPS)/release ## the source distribution and a wheel for each Python into dist: 2 minutes and one more a Python; VERSIONS=3.11,3.14t names some
	@$(PY) tools/wheels.py

test-wheel: $(STAMPS)/native ## the wheels of dist installed as users do, on other Pythons and CPU models: first installs QEMU; ARGS=--smoke is 2 minutes
	@$(PY) tools/installed_wheels.py $(ARGS)

lint: $(STAMPS)/base $(STAMPS)/lint ## ruff, mypy --strict, clang-format, and the C compiled with warnings as errors
	@$(PY) -m ruff check -q .
	@$(PY) -m ruff format -q --check .
	@$(PY) -m mypy
	@$(PY) tools/lint_c.py

format: $(STAMPS)/lint ## rewrite the sources as lint wants them
	@$(PY) -m ruff check -q --fix .
	@$(PY) -m ruff format -q .
	@$(PY) tools/lint_c.py --fix

site: $(STAMPS)/site ## the pages and the reference as a site, into build/site; a broken link is an error
	@$(PY) tools/make_site.py

config: $(STAMPS)/native ## what was compiled, what this CPU supports, what was chosen and why
	@$(PY) -m ktmoe config

clean: ## remove .venv, the peers' environments and everything that was built
	@rm -rf $(VENV) .venv-peers build dist .benchmarks ktmoe.egg-info ktmoe/_native/*.so .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\#.*/\1/p' $(firstword $(MAKEFILE_LIST))) FORCE# each that help lists

ifneq ($(or $(if $(HAVE),,none),$(filter-out $(WANT),$(HAVE))),)
$(STAMPS)/venv: FORCE
endif
CHECK = $(if $(filter environment command,$(firstword $(origin CC))),CC='$(CC)') sh tools/check_machine.sh '$(PYTHON)' venv
$(STAMPS)/venv:
	$(eval LACKS := $(shell $(CHECK)))$(if $(LACKS),$(error $(LACKS)))
	@echo 'ktmoe: making $(VENV) with $(PYTHON), and then building: about 3 minutes on 2 cores, once'
	@$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(EXTRAS:%=$(STAMPS)/%): $(STAMPS)/%: pyproject.toml $(STAMPS)/venv
	@$(PIP) $$($(PY) tools/requirements.py $(or $(with-$*),$*))
	@touch $@

# Editable: an edit of Python needs no build, an edit of C or Cython does.
$(STAMPS)/native: $(STAMPS)/base setup.py $(NATIVE)
	@echo 'ktmoe: building the native modules'
	@$(PIP:-q=-v) --no-build-isolation --no-deps -e . >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@sed -n 's/^ *\(ktmoe: .*\)/\1/p' $(VENV)/build.log
	@touch $@
