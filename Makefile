# What a fresh clone needs: make venv, then make demo or make test.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TF_OOO := $(BIN)/tf-ooo
LOCKS := requirements/dev.txt requirements/keras-hub.txt requirements/tf-keras.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Older TensorFlows, each in an environment of its own: docs/versions.md.
OTHERS := 2.15 2.18
# The one for JAX.
GPU_PYTHON ?= python3.12
# What runs on 2.15 in a few minutes: tensorflow-addons' parts, and every kind of thing once.
SMOKE := tests/graph/test_addons.py tests/graph/test_versions.py tests/test_smoke.py \
	$(wildcard tests/graph/test_compat_keras_*.py) tests/graph/test_moved_variables.py \
	$(addprefix tests/graph/test_compat_,func_graphs.py runtime.py shape_inference.py tf_functions.py train_function.py) \
	tests/graph/test_pipeline.py::test_two_devices_and_uneven_batches tests/graph/test_pipeline.py::test_legacy_optimizers \
	tests/graph/test_callback.py::test_not_rewritable_trains_on_and_says_why \
	'tests/graph/test_bit_equal.py::test_models[mlp]' 'tests/graph/test_bit_equal.py::test_models[convolutions]' \
	'tests/graph/test_bit_equal.py::test_models[lstm_gru]' tests/graph/test_examples.py::test_function_example

# Two processes run tests; a third fills the gaps of those that wait for others.
JOBS ?= 3
PYTEST := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --strict-skips

.PHONY: gpu-hlo gpu-tasks venv demo bench docs wheel wheel-smoke test test-quick lint horovod test-matrix smoke

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
$(VENV)/.installed: $(VENV)/.locked setup.py grappler_passes/plugin/shim.c $(wildcard tf_ooo/*/*.c) $(wildcard */__init__.py)
	PYTHONWARNINGS=ignore $(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

# Builds a wheel (some minutes) the first time; it is kept outside this folder, see requirements/horovod.sh.
horovod: $(VENV)/.horovod

$(VENV)/.horovod: $(VENV)/.locked requirements/horovod.sh requirements/horovod.txt
	requirements/horovod.sh $(VENV)
	touch $@

demo: venv
	$(TF_OOO) demo

# A short run of each benchmark, and what it came to; what a machine cannot run says so and is skipped.
bench: venv horovod
	failed=0; $(BIN)/python -m benchmarks run all --quick --rows build/rows || failed=1; \
	$(BIN)/python -m benchmarks report --rows build/rows --pictures build/pictures && exit $$failed

# The site, in build/site; a link that leads nowhere is an error.  Nothing is fetched but the locked packages.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Adds to what `make venv` installs, and changes nothing of it.
$(VENV)/.docs: $(VENV)/.installed requirements/docs.txt
	$(PIP) install -q --require-hashes -r requirements/docs.txt
	touch $@

# In dist: the source, and one wheel for all Pythons whose tag says which glibc it needs.
wheel: $(VENV)/.release
	@test -n "$$TF_OOO_REPOSITORY_URL" || \
		echo "warning: TF_OOO_REPOSITORY_URL is not set: no links in the metadata" >&2
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

# The wheel as users get it: with PYTHON, away from this folder, and with the newest packages that it allows.
wheel-smoke: IN_IT := build/wheel-smoke
wheel-smoke: wheel
	rm -rf $(IN_IT)
	$(PYTHON) -m venv $(IN_IT)
	@echo "installing the wheel into $(IN_IT) (a minute or two)"
	$(IN_IT)/bin/python -m pip --disable-pip-version-check install -q "$$(echo dist/*.whl)[cpu,digits]" pytest
	mkdir $(IN_IT)/away
	cp tests/test_smoke.py $(IN_IT)/away
	touch $(IN_IT)/away/pytest.ini  # else pytest takes the settings of this folder
	cd $(IN_IT)/away && export PYTHONPATH= && \
		../bin/python -m pytest test_smoke.py && ../bin/tf-ooo doctor && ../bin/tf-ooo demo --epochs 1

$(VENV)/.release: $(VENV)/.installed requirements/release.txt
	$(PIP) install -q --require-hashes -r requirements/release.txt
	touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/vulture grappler_passes tf_ooo keras_callbacks benchmarks tests/not_dead.py --min-confidence 60
	$(BIN)/python -m tests.lean

# MINUTES=45 begins no test of whole programs (tests/last.py) after so many, and lists what it left out.
test: venv horovod lint
	$(BIN)/python $(PYTEST) --durations=20 $(MINUTES:%=--minutes %)

# Before each commit, under three minutes: the unit tests, and one thing of each mode.
test-quick: venv horovod
	$(BIN)/python $(PYTEST) -m quick

# One version after the other, all of them also where one fails.
test-matrix:
	$(MAKE) -j1 -k test $(OTHERS:%=test-%)

$(OTHERS:%=test-%): test-%: .venv-%/.installed .venv-%/.horovod
	.venv-$*/bin/python $(PYTEST)

# Any other version.
test-%:
	$(error $@: TensorFlow $* has no locked packages here; there are $(OTHERS:%=test-%))

# The launch order on an H100, by the compiler inside JAX, without a GPU; not in CI: its packages have 4.5 GB.
.PHONY: test-gpu-compiler
test-gpu-compiler: venv .venv-gpu-compiler/.installed
	TF_OOO_JAX_PYTHON=$(CURDIR)/.venv-gpu-compiler/bin/python $(BIN)/python $(PYTEST) tests/gpu

.venv-gpu-compiler/.installed: requirements/gpu-jax.in
	test -x .venv-gpu-compiler/bin/python || $(GPU_PYTHON) -m venv .venv-gpu-compiler
	@echo "installing JAX and CUDA into .venv-gpu-compiler (4.5 GB, some minutes)"
	.venv-gpu-compiler/bin/python -m pip --disable-pip-version-check install -q -r requirements/gpu-jax.in
	touch $@

smoke: .venv-2.15/.installed
	.venv-2.15/bin/python $(PYTEST) $(SMOKE)

.venv-%/.installed: requirements/tf-%.txt setup.py grappler_passes/plugin/shim.c $(wildcard tf_ooo/*/*.c)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@echo "installing TensorFlow $* and the locked packages into .venv-$* (a minute or two)"
	.venv-$*/bin/python -m pip --disable-pip-version-check install -q --require-hashes -r requirements/tf-$*.txt
	.venv-$*/bin/python -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps -e .
	touch $@

.venv-%/.horovod: .venv-%/.installed requirements/horovod.sh requirements/horovod.txt
	requirements/horovod.sh .venv-$*
	touch $@

# What benchmarks/gpu/day.sh measures on a machine with a GPU; ten minutes on two cores.
GPU_NETWORKS = densenet121-k12 densenet121-k24 mobilenetv3l-a0.5 resnet50 encoder-6x512 lstm-2x512
gpu-hlo: venv
	$(foreach network,$(GPU_NETWORKS),$(BIN)/python -m benchmarks.gpu.export_hlo build/hlo $(network) &&) true

# Kernels of a pipeline's compiled tasks, compiled for an H100 without one; six minutes on two cores.
gpu-tasks: venv .venv-gpu-compiler/.installed
	mkdir -p build/tasks
	set -e; for stem in mlp conv transformer; do for order in 1f1b zb_h1; do at=build/tasks/$${stem}_$$order; \
	  $(BIN)/python -m benchmarks.gpu.export_tasks build/tasks $$stem --schedule $$order; \
	  .venv-gpu-compiler/bin/python -m benchmarks.gpu.run_hlo build/tasks $${stem}_$$order $$(cat $$at.modules) \
	    --compile-only > $$at.kernels; done; done
	$(BIN)/python -m benchmarks.gpu.count_tasks build/tasks

# Random set-ups of a training, stock against rewritten; docs/testing.md.
SEED ?= 1
# Random malformed inputs (docs/testing.md).
.PHONY: malformed
malformed: N ?= 300
malformed: venv
	$(BIN)/python -m tests.malformed -n $(N) --seed $(SEED) --keep-going

.PHONY: fuzz
fuzz: N ?= 100
fuzz: venv
	$(BIN)/python -m tests.fuzz -n $(N) --seed $(SEED)
	$(BIN)/python -m tests.fuzz.kinds -n $(N) --seed $(SEED)

# Random set-ups of what users write themselves, in each mode; docs/testing.md.
.PHONY: fuzz-kinds
fuzz-kinds: N ?= 40
fuzz-kinds: venv horovod
	for mode in single pipeline data_parallel; do \
		$(BIN)/python -m tests.fuzz.kinds -n $(N) --seed $(SEED) --mode $$mode || failed=1; \
	done; test -z "$$failed"

# Keras' own tests that train, stock and as a pipeline of two devices; docs/testing.md.
.PHONY: keras-own
keras-own: venv
	$(BIN)/python -m tests.keras_own

# Random faults in small trainings; docs/testing.md.
.PHONY: faults
faults: N ?= 100
faults: venv horovod
	$(BIN)/python -m tests.faults -n $(N) --seed $(SEED) --keep-going

.PRECIOUS: .venv-%/.installed .venv-%/.horovod

# Not part of `make test`: changes one place of a module at a time, see docs/testing.md.
.PHONY: mutants
mutants: N ?= 200
mutants: $(VENV)/.mutants
	PYTHONHASHSEED=0 $(BIN)/python -m tests.mutation -n $(N) --seed $(SEED) --keep-going

# Adds to what `make venv` installs, and changes nothing of it.
$(VENV)/.mutants: $(VENV)/.installed requirements/mutants.txt
	$(PIP) install -q --require-hashes -r requirements/mutants.txt
	touch $@
