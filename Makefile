# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A stamp file, so that a changed setup.py installs again and an unchanged one does not.
READY := $(VENV)/.installed
# OpenBLAS workers stall one another where all cores are busy, as they are in tests.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo test test-fast test-compat lint colcon clean help

help:
	@echo "make demo         render a scene, run it through the ROS nodes, judge the result (out/demo/report.html)"
	@echo "make test         lint and all tests"
	@echo "make test-fast    tests without the slow ones"
	@echo "make test-compat  the core's tests with NumPy 1.26 and OpenCV 4, without poselib"
	@echo "make colcon       colcon build, plain and with --symlink-install, in build/"
	@echo "make clean        remove what the above made"

$(READY): setup.py setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=61,<80" wheel
	$(BIN)/python -m pip install --quiet --editable ".[ros,poselib,dev]"
	@touch $@

demo: $(READY)
	$(BIN)/python -m vslam_features demo --out out/demo

test: $(READY) lint
	$(BIN)/python -m pytest

test-fast: $(READY) lint
	$(BIN)/python -m pytest -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The core on older libraries: what JetPack and Ubuntu bring, as far as PyPI has it.
COMPAT := $(VENV)-compat
CORE_TESTS := $(addprefix test/test_,$(addsuffix .py,camera images pose_track types config registry features matching \
	geometry retrieval keyframes loops frontend core_imports))

$(COMPAT)/.installed: Makefile
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --upgrade pip
	$(COMPAT)/bin/python -m pip install --quiet "numpy==1.26.*" "opencv-python-headless==4.8.*" "pyyaml>=5.4" \
		"tqdm>=4.57" "jinja2>=3.0" "rosbags>=0.11" "pytest>=7" pytest-timeout hypothesis scikit-image
	@touch $@

test-compat: $(COMPAT)/.installed
	PYTHONPATH=. $(COMPAT)/bin/python -m pytest -p no:cacheprovider $(CORE_TESTS)

colcon: $(READY)
	$(BIN)/colcon --log-base build/log build --base-paths . --build-base build/plain --install-base install/plain
	$(BIN)/colcon --log-base build/log build --base-paths . --build-base build/symlink --install-base install/symlink --symlink-install

clean:
	rm -rf $(VENV) $(VENV)-compat build install log out .pytest_cache .hypothesis *.egg-info
