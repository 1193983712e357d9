# Everything that a learner or a maintainer types here; `make help` explains each target in one line.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# The Python that .venv is made from, the index that torch comes from (empty: pip's own), and what a target passes on.
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
LAB := $(VENV)/.lab-ready
DEV := $(VENV)/.dev-ready
HOROVOD := $(VENV)/.horovod-ready
RIVALS := $(VENV)/rivals
PLATFORMS := .venv-platforms
PLATFORMS_READY := $(PLATFORMS)/.ready
PIP := -m pip --disable-pip-version-check install --constraint constraints.txt
# Tests that may run beside each other; the others measure, count what is left behind, or need the cores for themselves.
TOGETHER := $(addprefix tests/,authoring datasets exercises grading notebooks simulate visuals)
# Old packages warn about many things that are theirs to mend: there, warnings are no errors.
OLD_PYTEST := $(PLATFORMS)/bin/python -m pytest -W default
# Of the launcher, what meets the old Jupyter and the old psutil; `make test-long` runs all but other frameworks there.
OLD_LAUNCHER := $(addprefix tests/launcher/test_,environment.py kernel.py output.py processes.py) \
  --deselect tests/launcher/test_processes.py::test_L28_a_hundred_launches_leave_nothing_behind
OLD_LAUNCHER_WHOLE := tests/launcher $(addprefix --ignore tests/launcher/,frameworks test_ranks.py test_faults.py)

# The address that JupyterLab prints is lesson 00's; it asks no server for news, and runs for root only when told to.
LAB_OPTIONS := --ServerApp.root_dir=notebooks --LabApp.default_url=/lab/tree/00_start_here.ipynb --LabApp.news_url=None \
  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab test test-long check lessons bench release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12    the Python (3.11 or newer) that .venv is made from, the first time"
	@echo "  TORCH_INDEX=ADDRESS  where torch comes from, for instance the CPU builds that pytorch.org lists"
	@echo "  ARGS='...'           passed on: make lab ARGS=--no-browser, make test ARGS='-k launch'"

lab: $(LAB) ## Open lesson 00 in JupyterLab
	@echo "JupyterLab opens notebooks/00_start_here.ipynb; Ctrl-C twice ends it."
	@$(RUN) -m jupyterlab $(LAB_OPTIONS) $(ARGS)

test: check $(PLATFORMS_READY) $(HOROVOD) ## Check the sources, run the tests and every solved lesson, here and on the platforms' old Jupyter
	@echo "Tests of the package and the repository, and every solved lesson under nbval:"
ifeq ($(ARGS),)
	@$(RUN) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(TOGETHER)
	@$(RUN) -m pytest $(addprefix --ignore ,$(TOGETHER))
else
	@$(RUN) -m pytest $(ARGS)
endif
	@echo "The launcher, on the Jupyter that Kaggle and Colab carry:"
	@$(OLD_PYTEST) tests/platforms tests/test_front_end.py $(if $(COURSE_LONG),$(OLD_LAUNCHER_WHOLE),$(OLD_LAUNCHER))
	@echo "Lesson 01, on the Jupyter that Kaggle and Colab carry:"
	@COURSE_PLAIN=1 $(OLD_PYTEST) --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg \
	  notebooks/solutions/01_*.ipynb

test-long: export COURSE_LONG = 1
test-long: test ## The same with the long soaks whole

check: $(DEV) ## Format, lint, types, and whether the notebooks match their sources
	@echo "Format, lint, types, and notebooks against their sources:"
	@$(RUN) -m ruff format --check --quiet
	@$(RUN) -m ruff check --quiet
	@$(RUN) -m mypy --no-error-summary
	@$(RUN) -m course_utils.authoring build --check

lessons: $(DEV) ## Build the editions of every lesson from notebooks/source (ARGS=01: of that one)
	@echo "Building the learner editions and running the solved ones:"
	@$(RUN) -m course_utils.authoring build $(ARGS)

bench: $(DEV) $(HOROVOD) $(RIVALS) ## Time imports, launches, calls of ranks, verdicts, rings and the own DDP against their targets
	@echo "Timing an import, launches and calls of ranks against other launchers, verdicts, rings, and the own DDP against torch, in turns:"
	@failed=0; \
	 $(RUN) tests/benchmarks/bench_import.py || failed=1; \
	 $(RUN) tests/benchmarks/bench_launch.py $(ARGS) || failed=1; \
	 PYTHONPATH=$(RIVALS) $(RUN) tests/benchmarks/bench_frameworks.py || failed=1; \
	 $(RUN) tests/benchmarks/bench_verdict.py || failed=1; \
	 $(RUN) tests/benchmarks/bench_ring.py || failed=1; \
	 $(RUN) tests/benchmarks/bench_ddp.py || failed=1; \
	 exit $$failed

release: $(DEV) ## Build the wheel and the bundle of learner editions into dist/
	@echo "Building the wheel and the learners' bundle into dist/:"
	@$(RUN) -m course_utils.authoring release --out dist
	@$(RUN) -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove the environments and everything that was built, keeping the notebooks
	@echo "Removing $(VENV), $(PLATFORMS), dist and caches."
	@rm -rf $(VENV) $(PLATFORMS) dist build .mypy_cache .pytest_cache .ruff_cache

# Set-up. A stage writes its stamp last; `.unfinished` marks one that was cut short, and the next stage then starts afresh,
# because an interrupted pip can leave half a package that looks whole.
define set_up
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "This course needs Python 3.11 or newer, and '$(PYTHON)' is not." >&2; \
	  echo "Name one that is, for instance: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks its venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@if [ -e $(VENV)/.unfinished ]; then echo "The last set-up was cut short: starting afresh."; rm -rf $(VENV); fi
	@echo "Setting up $(VENV) for $(1) (once; a few minutes)."
	@rm -f $(LAB) $(DEV) $(HOROVOD) && mkdir -p $(VENV) && touch $(VENV)/.unfinished
	@[ -x $(RUN) ] || $(PYTHON) -m venv $(VENV)
	@$(RUN) $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(RUN) $(PIP) -qq editables hatchling
	@$(RUN) $(PIP) -qq --no-build-isolation --editable '.[$(1)]'
	@touch $(2)
	@rm $(VENV)/.unfinished
endef

$(LAB): constraints.txt pyproject.toml
	$(call set_up,lab,$(LAB))

$(DEV): constraints.txt pyproject.toml
	$(call set_up,lab$(comma)dev$(comma)tensorflow,$(LAB) $(DEV))

comma := ,

# One wheel for each set of versions is kept in the user's cache, so this takes minutes the first time and seconds after.
$(HOROVOD): course_utils/horovod_build/recipe.py | $(DEV)
	@echo "Bringing Horovod (built once for these versions of torch and TensorFlow):"
	@if $(RUN) -m course_utils.horovod_build; then touch $@; \
	  elif [ "$$REQUIRE_ALL" = 1 ]; then exit 1; else echo "The tests that need Horovod will be skipped."; fi

# What the benchmarks measure themselves against, beside the environment and not in it.
$(RIVALS): | $(DEV)
	@$(RUN) -m pip --disable-pip-version-check install -qq --no-deps --target $@ decorator entrypoints ipyparallel tqdm

site_packages := import sysconfig; print(sysconfig.get_path('purelib'))

# The old packages come first; torch, pytest and the rest are seen through a path file, so nothing is installed twice.
$(PLATFORMS_READY): tests/platforms/requirements.txt | $(DEV)
	@echo "Setting up $(PLATFORMS): the Jupyter that Kaggle and Colab carry (once; a minute)."
	@rm -rf $(PLATFORMS)
	@$(RUN) -m venv $(PLATFORMS)
	@$(PLATFORMS)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r tests/platforms/requirements.txt
	@{ $(RUN) -c "$(site_packages)" && pwd; } > "$$($(PLATFORMS)/bin/python -c "$(site_packages)")/shared.pth"
	@touch $@
