# Every target makes the environment it needs. What each runs stands below; options:
#   TORCH=torch==2.14.1      gate another release (default: the pinned one)
#   PYTHON=/usr/bin/python3  the interpreter that environments are made with
#   USE=/path/to/python      an interpreter that has its torch already: nothing is installed
#   WORKERS=4                processes (default: one per core)
#   OPTIONS='-m gelu'        options of pytest, for the gate and the claims

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
WORKERS ?= auto
VENVS   ?= .venv
RUNS    := reports/runs

venv = $(VENVS)/$(subst ==,-,$(1))
RUN  = $(if $(USE),$(USE),$(call venv,$(TORCH))/bin/python)
NEED = $(if $(USE),usable,release $(call venv,$(TORCH))/ready)

# Environments are named by their release, so it is one: no range, which would name another tomorrow.
a_release = @case '$($(1))' in torch==[0-9]*) ;; \
	*) echo "error: $(1)=$($(1)) names no release of torch; name one as $(1)=torch==2.14.1"; exit 4;; esac

.PHONY: gate gpu test pretended upgrade golden faults bench predict twins zoo claims clean honest usable release

gate: honest $(NEED)  ## check the torch that is installed; prints the matrix, writes a record
	$(RUN) -m fixtures.gate -n $(WORKERS) $(OPTIONS)

gpu: honest $(NEED)  ## the first minutes on a GPU: all that is worth knowing, in one folder (docs/first_gpu.md)
	$(RUN) -m fixtures.first_minutes $(if $(PRETEND),--pretend $(PRETEND))

test: $(NEED)  ## the suite's own tests, its style and its types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest meta_tests -W error -n $(WORKERS)

pretended: $(NEED)  ## rehearse a GPU's checks on two pretended H100 (docs/pretended.md); BRIEF=1 a selection
	$(RUN) -m pytest -m 'h100 and not ranks and not compiled' --pretend h100,h100 -n $(WORKERS) \
	--model meta_tests.own_models:sound $(if $(BRIEF),--brief)

upgrade: honest  ## make upgrade FROM=torch==2.13.0 TO=torch==2.14.1: what did the upgrade change?
	@test -n "$(FROM)" -a -n "$(TO)" || { echo 'usage: make upgrade FROM=torch==A TO=torch==B'; exit 4; }
	$(call a_release,FROM)
	$(call a_release,TO)
	$(MAKE) $(call venv,$(FROM))/ready TORCH=$(FROM)
	$(MAKE) $(call venv,$(TO))/ready TORCH=$(TO)
	$(call venv,$(TO))/bin/python -m reports upgrade $(call venv,$(FROM))/bin/python -n $(WORKERS)

golden: $(NEED)  ## make all golden truth anew and compare it byte by byte
	$(RUN) -m pytest --golden=verify -q

faults: $(NEED)  ## the detection score; FULL=1 runs every node under every fault
	$(RUN) -m fixtures.faults $(if $(FULL),--full)

predict: $(NEED)  ## make predict FROM=A100 TO=H100: what a change of GPU will change, and why; MODEL=package.module:factory for yours
	@test -n "$(FROM)" -a -n "$(TO)" || { echo 'usage: make predict FROM=A100 TO=H100'; exit 4; }
	$(RUN) -m fixtures.prediction $(FROM) $(TO) $(if $(MODEL),--model $(MODEL))

twins: $(NEED)  ## one training run on two code paths of the CPU: where they part first, and by how much
	$(RUN) -m fixtures.audit.twins

zoo: $(NEED)  ## the checks of --model on ten models that people train (docs/your_model.md); minutes each
	$(RUN) -m fixtures.own_model.zoo

claims: $(NEED)  ## try again what is said about the precision of training: docs/claims.md
	$(RUN) -m fixtures.gate -m claims -n $(WORKERS) $(OPTIONS)

bench: $(NEED)  ## speed, as ratios within one run
	$(RUN) -m fixtures.bench

honest:
	@test -z "$$PRECISION_INJECT" || { echo "PRECISION_INJECT=$$PRECISION_INJECT is set: a gate runs without a fault; unset it"; exit 4; }

clean:
	rm -rf $(VENVS) .pytest_cache .hypothesis .mypy_cache .ruff_cache

release:
	$(call a_release,TORCH)

usable:
	@command -v '$(USE)' > /dev/null || { echo "error: USE=$(USE) cannot be run; name the interpreter whose torch is to be checked, as USE=/opt/venv/bin/python"; exit 4; }
	@test usable = "$$('$(USE)' -c 'import sys; sys.version_info < (3, 11) and sys.exit("error: $(USE) is Python %d.%d; the suite needs 3.11 or later" % sys.version_info[:2]); \
	from importlib.util import find_spec; lacks = [n for n in "torch pytest hypothesis numpy scipy safetensors mpmath packaging".split() if not find_spec(n)]; \
	lacks and sys.exit("error: $(USE) lacks " + ", ".join(lacks) + "; with torch installed, $(USE) -m pip install -e . adds the rest"); print("usable")')" \
	|| { echo "error: USE=$(USE) cannot check a torch: name an interpreter of Python 3.11 or later that has one"; exit 4; }

# Pins, so that the same environment is built everywhere; torch itself is what TORCH says, and what
# torch requires is its own choice. Where pip fails, its words are shown and nothing half made stays.
$(VENVS)/%/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "error: PYTHON=$(PYTHON) is no Python 3.11 or later; name one, as PYTHON=/usr/bin/python3.12"; exit 4; }
	@echo "$(VENVS)/$*: installing $(TORCH) and the suite, which takes minutes; pip's words: $(VENVS)/$*.log"
	@mkdir -p $(VENVS); \
	trap 'test -e $@ || rm -rf $(VENVS)/$*' EXIT; trap 'exit 130' INT TERM; \
	{ $(PYTHON) -m venv $(VENVS)/$* && \
	  $(VENVS)/$*/bin/python -m pip install -c constraints.txt $(TORCH) -e '.[dev]'; \
	} > $(VENVS)/$*.log 2>&1 || { tail -n 40 $(VENVS)/$*.log; exit 1; }; \
	touch $@
