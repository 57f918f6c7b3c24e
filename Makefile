# every target does its own set-up: a virtual environment with the pinned, tested versions of constraints.txt
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PRINT_SITE := import sysconfig; print(sysconfig.get_path("purelib"))
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-fast test-gpu kill quality style clean

demo: $(VENV)/ready
	$(VENV)/bin/python examples/demo.py

# the second time, with the oldest transformers, without what does not depend on it; saved and loaded there, one family
test: $(VENV)/ready $(OLDEST)/ready
	$(VENV)/bin/python -m pytest -n 2 --peer-python $(OLDEST)/bin/python tests
	$(OLDEST)/bin/python -m pytest -n 2 -m "not slow" --peer-python $(VENV)/bin/python \
	    --ignore tests/kernels --ignore tests/benchmarks \
	    -k "not same-attnres and not same-denseformer and not same-mhc and not same-moda_olmo2" tests

test-fast: $(VENV)/ready
	$(VENV)/bin/python -m pytest -n 2 -m "not slow" tests

test-gpu: $(VENV)/ready
	$(VENV)/bin/python -m pytest tests/gpu tests/kernels

# conversions that signals meet at random points: make kill TRIALS=1000 SEED=1
TRIALS ?= 300
SEED ?= 0
kill: $(VENV)/ready
	DEPTHMIX_KILL=$(TRIALS) DEPTHMIX_KILL_SEED=$(SEED) \
	    $(VENV)/bin/python -m pytest -n 0 -s -k random_points tests/conversion/test_kill.py

quality: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell

style: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) demo_output build dist *.egg-info

$(VENV)/ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -e ".[test,quality]"
	touch $@

# the oldest supported transformers, without Triton; everything else is read from the first environment
$(OLDEST)/ready: $(VENV)/ready constraints-oldest.txt
	$(PYTHON) -m venv --without-pip $(OLDEST)
	$(VENV)/bin/python -m pip --python $(OLDEST)/bin/python install --quiet --disable-pip-version-check --no-deps \
		-r constraints-oldest.txt -e .
	site=$$($(OLDEST)/bin/python -c '$(PRINT_SITE)'); \
		$(VENV)/bin/python -c '$(PRINT_SITE)' > $$site/shared.pth; \
		echo 'import sys; sys.modules["triton"] = None' > $$site/without_triton.pth
	touch $@
