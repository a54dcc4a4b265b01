# What a fresh clone needs: make venv, then make demo or make test.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TF_OOO := $(BIN)/tf-ooo
LOCKS := requirements/dev.txt requirements/keras-hub.txt requirements/tf-keras.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Older TensorFlows, each in an environment of its own: docs/versions.md.
OTHERS := 2.15 2.18
# What runs on 2.15 in a few minutes: tensorflow-addons' parts, and every kind of thing once.
SMOKE_ADDONS := tests/graph/test_addons.py tests/graph/test_versions.py
SMOKE_REST := tests/test_smoke.py tests/graph/test_compat_keras.py tests/graph/test_pipeline_compat.py \
	tests/graph/test_pipeline.py::test_two_devices_and_uneven_batches tests/graph/test_pipeline.py::test_legacy_optimizers \
	tests/graph/test_callback.py::test_not_rewritable_trains_on_and_says_why \
	'tests/graph/test_bit_equal.py::test_models[mlp]' 'tests/graph/test_bit_equal.py::test_models[convolutions]' \
	'tests/graph/test_bit_equal.py::test_models[lstm_gru]' 'tests/graph/test_examples.py::test_example[02_tf_function.py]'

# Graph tests whose models are spread over devices, and those whose steps are compiled or unrolled, in processes of their own.
MODES := $(wildcard tests/graph/test_pipeline*.py tests/graph/test_layerpipe*.py)
COMPILED := $(wildcard tests/graph/test_xla*.py) tests/graph/test_examples.py tests/graph/test_unrolled_steps.py
LEGS := test-modes test-others test-graph test-compiled

.PHONY: venv demo bench test $(LEGS) lint horovod test-matrix smoke smoke-addons smoke-rest

venv: $(VENV)/.installed

# The locked packages, at their pinned hashes.
$(VENV)/.locked: $(LOCKS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked packages into $(VENV) (a minute or two)"
	$(PIP) install -q --require-hashes -r requirements/dev.txt
	$(PIP) install -q --require-hashes --no-deps -r requirements/keras-hub.txt
	$(PIP) install -q --require-hashes --no-deps -r requirements/tf-keras.txt
	touch $@

# This package, editable; compiles the graph optimizer.
$(VENV)/.installed: $(VENV)/.locked setup.py grappler_passes/plugin/shim.c $(wildcard */__init__.py)
	PYTHONWARNINGS=ignore $(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

# Builds a wheel (some minutes) the first time; it is kept outside this folder, see requirements/horovod.sh.
horovod: $(VENV)/.horovod

$(VENV)/.horovod: $(VENV)/.locked requirements/horovod.sh requirements/horovod.txt
	requirements/horovod.sh $(VENV)
	touch $@

demo: venv
	$(TF_OOO) demo

# A short run of each benchmark; what a machine cannot run says so and is skipped.
bench: venv horovod
	for mode in single data-parallel pipeline layerpipe; do $(TF_OOO) bench $$mode --quick || exit 1; done

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes for two cores: most tests use one, and those with several processes often wait. The longest first.
test: venv horovod lint
	$(MAKE) -j3 --output-sync=target $(LEGS)

test-graph:
	$(BIN)/python -m pytest tests/graph $(MODES:%=--ignore=%) $(COMPILED:%=--ignore=%)

test-modes:
	$(BIN)/python -m pytest $(MODES)

test-compiled:
	$(BIN)/python -m pytest $(COMPILED)

test-others:
	$(BIN)/python -m pytest tests/distributed tests/unit tests/gpu tests/test_smoke.py

# One version after the other, all of them also where one fails.
test-matrix:
	$(MAKE) -j1 -k test $(OTHERS:%=test-%)

$(OTHERS:%=test-%): test-%: .venv-%/.installed .venv-%/.horovod
	$(MAKE) -j3 -k --output-sync=target BIN=.venv-$*/bin $(LEGS)

# Any other version.
test-%:
	$(error $@: TensorFlow $* has no locked packages here; there are $(OTHERS:%=test-%))

smoke: .venv-2.15/.installed
	$(MAKE) -j2 --output-sync=target smoke-addons smoke-rest

smoke-addons:
	.venv-2.15/bin/python -m pytest -q $(SMOKE_ADDONS)

smoke-rest:
	.venv-2.15/bin/python -m pytest -q $(SMOKE_REST)

.venv-%/.installed: requirements/tf-%.txt setup.py grappler_passes/plugin/shim.c
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@echo "installing TensorFlow $* and the locked packages into .venv-$* (a minute or two)"
	.venv-$*/bin/python -m pip --disable-pip-version-check install -q --require-hashes -r requirements/tf-$*.txt
	.venv-$*/bin/python -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps -e .
	touch $@

.venv-%/.horovod: .venv-%/.installed requirements/horovod.sh requirements/horovod.txt
	requirements/horovod.sh .venv-$*
	touch $@

.PRECIOUS: .venv-%/.installed .venv-%/.horovod

# Not part of `make test`: changes one place of a module at a time, see docs/testing.md.
N ?= 200
SEED ?= 1

.PHONY: mutants
mutants: $(VENV)/.mutants
	PYTHONHASHSEED=0 $(BIN)/python tests/mutation/run.py -n $(N) --seed $(SEED)

# Adds to what `make venv` installs, and changes nothing of it.
$(VENV)/.mutants: $(VENV)/.installed requirements/mutants.txt
	$(PIP) install -q --require-hashes -r requirements/mutants.txt
	touch $@
