# every target does its own set-up: a virtual environment with the pinned, tested versions of constraints.txt
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
# of the environment with the oldest transformers; with another one than PYTHON, `make test` tests two Pythons
OLDEST_PYTHON ?= $(PYTHON)
SHARED := $(filter $(lastword $(shell $(PYTHON) -V 2>&1)),$(lastword $(shell $(OLDEST_PYTHON) -V 2>&1)))
DOCS := .venv-docs
PRINT_EXTRA := import configparser, sys; setup = configparser.ConfigParser(); setup.read("setup.cfg"); \
	print(setup["options.extras_require"][sys.argv[1]])
VLLM := .venv-vllm
EXTRAS := .venv-extras
CALIBRATION := .venv-calibration
PRINT_SITE := import sysconfig; print(sysconfig.get_path("purelib"))
# Python compiles what it imports, and keeps it even where the surroundings say otherwise: tests start dozens of
# processes, and without that each takes six seconds longer. Of what is installed it is a part, so pip compiles nothing
unexport PYTHONDONTWRITEBYTECODE
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile

.PHONY: demo environments compiled test test-all test-fast test-pythons coverage test-gpu test-vllm test-extras test-calibration \
	fuzz kill docs quality style clean

demo: $(VENV)/ready
	$(VENV)/bin/python examples/demo.py

environments: $(VENV)/ready $(OLDEST)/ready

# both environments, and compiled what the tests import, tests included, as Python does when they are collected
compiled: environments
	$(VENV)/bin/python -m pytest --collect-only -qq tests > $(VENV)/collected || { cat $(VENV)/collected; exit 1; }
	$(OLDEST)/bin/python -m pytest --collect-only -qq tests > $(OLDEST)/collected || { cat $(OLDEST)/collected; exit 1; }

# a folder from which the packages of this checkout are imported, though they are not installed
LINK_PACKAGES := import sys; from pathlib import Path; from benchmarks.versions import link_packages; \
	link_packages(Path.cwd(), Path(sys.argv[1]))

# two workers; who has nothing left to do takes tests from the other
PYTEST := -m pytest -n 2 --dist worksteal

# with the newest supported transformers, and with the oldest what depends on it; setup.cfg explains the markers
test: $(VENV)/ready $(OLDEST)/ready
	$(VENV)/bin/python $(PYTEST) -m "not exhaustive" --peer-python $(OLDEST)/bin/python tests
	$(OLDEST)/bin/python $(PYTEST) -m "not exhaustive and not once" --peer-python $(VENV)/bin/python tests

# besides, every family of the slow checks and every GPU that kernels are compiled for
test-all: $(VENV)/ready $(OLDEST)/ready
	$(VENV)/bin/python $(PYTEST) --peer-python $(OLDEST)/bin/python tests
	$(OLDEST)/bin/python $(PYTEST) -m "not once" --peer-python $(VENV)/bin/python tests

FAST ?= tests
test-fast: $(VENV)/ready
	$(VENV)/bin/python $(PYTEST) -m "not slow and not exhaustive" $(FAST)

# the quick tests, or FAST of them, on the other supported Pythons that this machine has, in an environment for each
PYTHONS ?= 3.11 3.12 3.13
test-pythons:
	@own=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	for version in $(PYTHONS); do \
		if [ "$$version" = "$$own" ]; then continue; fi; \
		python=$$(pyenv prefix $$version 2> /dev/null)/bin/python; \
		if [ ! -x "$$python" ]; then python=python$$version; fi; \
		if ! $$python -c "" 2> /dev/null; then echo "Python $$version is not here: not tested"; continue; fi; \
		$(MAKE) test-fast PYTHON=$$python VENV=.venv-$$version || exit 1; \
	done

# which lines the tests run; COVERED are the arguments of pytest. Kernels run on a GPU or in an interpreter, unseen
COVERED ?= -m "not exhaustive" tests
coverage: $(VENV)/ready
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) -c constraints.txt \
		$$($(VENV)/bin/python -c '$(PRINT_EXTRA)' coverage)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --cov --cov-report= $(COVERED)
	$(VENV)/bin/python -m coverage report --skip-covered --show-missing
	for folder in configuration modeling kernels conversion depthmix; do \
		echo "$$folder: $$($(VENV)/bin/python -m coverage report --format=total --include="$$folder/**") %"; done

test-gpu: $(VENV)/ready
	$(VENV)/bin/python -m pytest tests/gpu tests/kernels

# needs no GPU; some twenty minutes on two cores, which compile. depthmix is not installed there, so that a server finds
# it only where a test says so
test-vllm: $(VLLM)/ready
	rm -rf $(VLLM)/tree
	$(VLLM)/bin/python -c '$(LINK_PACKAGES)' $(VLLM)/tree
	PYTHONPATH=$(CURDIR)/$(VLLM)/tree $(VLLM)/bin/python -P -m pytest tests/servers

# with packages that train, quantise and evaluate
test-extras: $(EXTRAS)/ready
	$(EXTRAS)/bin/python $(PYTEST) tests/extras

# GPTQ by llm-compressor, which allows an older transformers only
test-calibration: $(CALIBRATION)/ready
	$(CALIBRATION)/bin/python -m pytest tests/extras/test_llm_compressor.py

# damaged checkpoints by the thousand, from one seed: FUZZ_COUNT of each of six kinds, each for FUZZ_SECONDS at most
fuzz: $(VENV)/ready
	FUZZ_COUNT=$${FUZZ_COUNT:-1000} FUZZ_SEED=$${FUZZ_SEED:-1} FUZZ_SECONDS=$${FUZZ_SECONDS:-900} \
		$(VENV)/bin/python -m pytest -n 2 -s tests/conversion/test_fuzz.py

# conversions that signals meet at random points: make kill TRIALS=1000 SEED=1
TRIALS ?= 300
SEED ?= 0
kill: $(VENV)/ready
	DEPTHMIX_KILL=$(TRIALS) DEPTHMIX_KILL_SEED=$(SEED) \
	    $(VENV)/bin/python -m pytest -n 0 -s -k random_points tests/conversion/test_kill.py

# the documentation as a site, in site/; a warning is an error
docs: $(DOCS)/ready
	rm -rf $(DOCS)/tree
	$(DOCS)/bin/python -c '$(LINK_PACKAGES)' $(DOCS)/tree
	$(DOCS)/bin/mkdocs build --strict

quality: $(VENV)/ready
	rm -rf $(VENV)/tree
	$(VENV)/bin/python -c '$(LINK_PACKAGES)' $(VENV)/tree
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/mypy

style: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(PYTHONS:%=.venv-%) $(OLDEST) $(DOCS) $(VLLM) $(EXTRAS) $(CALIBRATION) site demo_output build dist *.egg-info

$(VENV)/ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) -c constraints.txt -e ".[test,quality]"
	touch $@

# it reads the package's source and imports none of it, so neither torch nor transformers is needed
$(DOCS)/ready: setup.cfg constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install $(PIP_OPTIONS) -c constraints.txt $$($(DOCS)/bin/python -c '$(PRINT_EXTRA)' docs)
	touch $@

# the oldest supported transformers, without Triton; everything else is read from the first environment, if that is of
# the same Python
$(OLDEST)/ready: $(if $(SHARED),$(VENV)/ready) setup.cfg pyproject.toml constraints.txt constraints-oldest.txt
ifdef SHARED
	$(OLDEST_PYTHON) -m venv --without-pip $(OLDEST)
	$(VENV)/bin/python -m pip --python $(OLDEST)/bin/python install $(PIP_OPTIONS) --no-deps \
		-r constraints-oldest.txt -e .
	$(VENV)/bin/python -c '$(PRINT_SITE)' > $$($(OLDEST)/bin/python -c '$(PRINT_SITE)')/shared.pth
else
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	sed 's/==.*/==/' constraints-oldest.txt | grep -vFf - constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install $(PIP_OPTIONS) -c $(OLDEST)/constraints.txt -r constraints-oldest.txt -e ".[test]"
endif
	echo 'import sys; sys.modules["triton"] = None' \
		> $$($(OLDEST)/bin/python -c '$(PRINT_SITE)')/without_triton.pth
	touch $@

# what vLLM draws in for images and sound is built for another torch, and breaks imports of transformers
$(VLLM)/ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install $(PIP_OPTIONS) -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(EXTRAS)/ready: setup.cfg pyproject.toml constraints.txt constraints-extras.txt
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install $(PIP_OPTIONS) -r constraints-extras.txt -e .
	touch $@

$(CALIBRATION)/ready: setup.cfg pyproject.toml constraints-calibration.txt
	$(PYTHON) -m venv $(CALIBRATION)
	$(CALIBRATION)/bin/python -m pip install $(PIP_OPTIONS) -r constraints-calibration.txt -e .
	touch $@
