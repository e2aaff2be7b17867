"""Engines at work, on a fake GPU: results equal ONNX Runtime's, memory stays, graphs change nothing."""

import gc
import logging
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import trt_helpers as t
from trt_helpers import assert_same, expected, open_session, place_engine, rows

from vslam_features.errors import BackendError, DataError, NonFiniteError
from vslam_features.runtimes.base import TensorSpec
from vslam_features.runtimes.trt_graphs import GRAPHS, RECORD_AT, Graphs

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")


@pytest.fixture
def matcher(tmp_path, fake_tensorrt):
    """An engine of ``similarity``, and what computes the same."""
    model = t.similarity()
    return place_engine(tmp_path / "tiny.engine", fake_tensorrt, model, t.SIMILARITY), model


def pair(rng, n, m):
    return {"a": rows(rng, n), "b": rows(rng, m)}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_results_equal_those_of_onnx_runtime(tmp_path, fake_tensorrt, version, graphs):
    fake_tensorrt.use(tensorrt=version)
    model, rng = t.similarity(), np.random.default_rng(0)
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.SIMILARITY), cuda_graphs=graphs)
    assert session.inputs == {n: TensorSpec(np.dtype(np.float32), (1, None, 8)) for n in "ab"}
    assert session.outputs["nearest"] == TensorSpec(np.dtype(np.int64), (1, None))
    for n, m in [(5, 5), (1, 40), (40, 1), (5, 5), (5, 5), (5, 5), (5, 5), (0, 7), (7, 0), (0, 0), (5, 5), (0, 7)]:
        inputs = pair(rng, n, m)
        assert_same(session.run(inputs), expected(model, inputs))
    session.close()
    assert not any(fake_tensorrt.live().values()), fake_tensorrt.live()


def test_what_runs_is_told(tmp_path, fake_tensorrt):
    facts = {"precision": "fp16", "layer_precisions": {"/core/MatMul": "bf16"}}
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, t.logarithm(), {}, **facts)
    active = open_session(path).active
    assert (active.runtime, active.version, active.device) == ("tensorrt", "10.13.3.9", "cuda:0 NVIDIA Orin")
    assert (active.provider, active.note) == ("TensorRT bf16 fp16", "")
    plain = place_engine(tmp_path / "f.engine", fake_tensorrt, t.logarithm(), {})
    assert open_session(plain).active.provider == "TensorRT"


def test_outputs_whose_shape_depends_on_values(tmp_path, fake_tensorrt):
    model, rng = t.kept(), np.random.default_rng(1)
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.KEPT))
    assert session.outputs["kept"].shape == (None,)
    for count, sign in [(8, 1), (64, 1), (64, -1), (3, 1), (0, 1), *[(20, 1)] * 6]:
        inputs = {"x": np.abs(rng.standard_normal(count)).astype(np.float32) * sign}
        assert_same(session.run(inputs), expected(model, inputs))
    mixed = {"x": rng.standard_normal(64).astype(np.float32)}
    assert_same(session.run(mixed), expected(model, mixed))
    assert fake_tensorrt.calls("cudaStreamBeginCapture") == 0 and session.active.note == ""


def test_types(tmp_path, fake_tensorrt):
    model, rng = t.types(), np.random.default_rng(2)
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.TYPES))
    for n in (4, 9, 1):
        inputs = {
            "half": rng.standard_normal((2, n)).astype(np.float16),
            "count": rng.integers(-(1 << 60), 1 << 60, n),
            "flag": rng.random(n) < 0.5,
            "small": np.array(n - 3, np.int32),
        }
        assert_same(session.run(inputs), expected(model, inputs))


def test_values_that_shapes_depend_on_stay_on_the_host(tmp_path, fake_tensorrt):
    model, rng = t.first_rows(), np.random.default_rng(3)
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.FIRST_ROWS))
    for n in [4, 9, 4, 4, 4, 7, 7, 7, 7, 4, 0, 9]:  # the shape of n is the same: a graph holds for its value
        inputs = {"x": rng.standard_normal((9, 4)).astype(np.float32), "n": np.array([n])}
        assert_same(session.run(inputs), expected(model, inputs))
    assert fake_tensorrt.calls("cudaGraphLaunch") == 3  # of 4, 7 and 4, which came three times before
    assert fake_tensorrt.calls("infer_shapes") == 9  # whether TensorRT sees a new value at an old address is not said


def test_no_graphs_where_tensorrt_gives_an_output_on_the_host(tmp_path, fake_tensorrt, monkeypatch):
    """It writes that while a run is enqueued: a graph would leave there what another run has written."""
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, t.similarity(), t.SIMILARITY)
    assert open_session(path)._execution._graphs is not None
    where, host = fake_tensorrt.trt.ICudaEngine.get_tensor_location, fake_tensorrt.trt.TensorLocation.HOST
    location = lambda engine, name: host if name == "nearest" else where(engine, name)  # noqa: E731
    monkeypatch.setattr(fake_tensorrt.trt.ICudaEngine, "get_tensor_location", location)
    assert open_session(path)._execution._graphs is None


def test_results_belong_to_the_caller(matcher):
    path, _ = matcher
    session, rng = open_session(path), np.random.default_rng(4)
    first = session.run(pair(rng, 5, 5))
    kept = {name: value.copy() for name, value in first.items()}
    for _ in range(4):
        session.run(pair(rng, 5, 5))
    assert_same(first, kept)
    session.close()
    assert_same(first, kept)


def test_graphs_replay_what_comes_often(matcher, fake_tensorrt):
    path, model = matcher
    with_graphs, without = open_session(path), open_session(path, cuda_graphs=False)
    rng, runs = np.random.default_rng(5), 10
    fake_tensorrt.set_faults()
    for _ in range(runs):
        inputs = pair(rng, 12, 9)
        wanted = expected(model, inputs)
        assert_same(with_graphs.run(inputs), wanted)
        assert_same(without.run(inputs), wanted)
    assert fake_tensorrt.calls("cudaGraphLaunch") == runs - RECORD_AT
    assert fake_tensorrt.calls("cudaGraphInstantiate") == 1
    # A recorded run is enqueued twice: once to run, once to be recorded.
    assert fake_tensorrt.calls("execute_async_v3") == RECORD_AT + 1 + runs


def test_graphs_are_bounded_and_the_oldest_goes(matcher, fake_tensorrt):
    path, model = matcher
    session, rng = open_session(path), np.random.default_rng(6)
    session.run(pair(rng, 40, 40))  # the largest, so that no buffer moves below
    fake_tensorrt.set_faults()
    for size in range(1, GRAPHS + 3):
        for _ in range(RECORD_AT):
            inputs = pair(rng, size, size)
            assert_same(session.run(inputs), expected(model, inputs))
    assert fake_tensorrt.calls("cudaGraphInstantiate") == GRAPHS + 2
    assert fake_tensorrt.live()["graph_instances"] == GRAPHS and fake_tensorrt.live()["graphs"] == 0
    assert fake_tensorrt.calls("create_execution_context") == GRAPHS  # those of graphs that went are used again
    fake_tensorrt.set_faults()
    for size in (GRAPHS + 2, 3, 1):  # 1 and 2 went
        inputs = pair(rng, size, size)
        assert_same(session.run(inputs), expected(model, inputs))
    assert fake_tensorrt.calls("cudaGraphLaunch") == 2 and fake_tensorrt.calls("cudaGraphInstantiate") == 1


def test_uses_long_ago_count_no_more():
    graphs = Graphs(None, None, None)
    assert [graphs.due("often") for _ in range(RECORD_AT)] == [False] * (RECORD_AT - 1) + [True]
    assert not any(graphs.due(other) for other in range(10_000)) and not graphs.due("often")
    assert len(graphs._uses) <= 100


def test_a_buffer_that_moves_ends_the_graphs(matcher, fake_tensorrt):
    path, model = matcher
    session, rng = open_session(path), np.random.default_rng(7)
    for n, m in [(3, 3)] * 5 + [(40, 40)] + [(3, 3)] * 3:
        inputs = pair(rng, n, m)
        assert_same(session.run(inputs), expected(model, inputs))  # a stale graph writes to memory that is gone
    assert fake_tensorrt.calls("cudaGraphInstantiate") == 2
    assert fake_tensorrt.live()["graph_instances"] == 1


def test_no_graph_of_a_model_that_branches(tmp_path, fake_tensorrt):
    model, rng = t.branching(), np.random.default_rng(8)
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.BRANCHING))
    for _ in range(6):
        inputs = {"x": rng.standard_normal(4).astype(np.float32)}
        assert_same(session.run(inputs), expected(model, inputs))
    assert fake_tensorrt.calls("cudaStreamBeginCapture") == 0 and session.active.note == ""


def test_a_header_that_hides_a_branch_costs_the_graphs_only(tmp_path, fake_tensorrt, caplog):
    model = t.branching()
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.BRANCHING, has_if=False)
    session = open_session(path)
    with caplog.at_level(logging.WARNING):
        for i in range(8):
            inputs = {"x": np.full(4, i - 4, np.float32)}
            assert_same(session.run(inputs), expected(model, inputs))
    assert "without CUDA graphs" in session.active.note and "If cannot be captured" in session.active.note
    assert [r.levelname for r in caplog.records] == ["WARNING"]  # once
    assert fake_tensorrt.live()["contexts"] == 1


def test_memory_stays_over_500_runs_of_random_shapes(matcher, fake_tensorrt):
    path, model = matcher
    session, rng = open_session(path), np.random.default_rng(9)
    session.run(pair(rng, 40, 40))
    # As many contexts as there can be graphs; those come later only to stay.
    for size in range(1, GRAPHS + 1):
        for _ in range(RECORD_AT):
            session.run(pair(rng, size, size))
    before = fake_tensorrt.live()
    fake_tensorrt.set_faults()
    for run in range(500):
        n, m = rng.integers(0, 41, 2) if run % 2 else rng.integers(1, 4, 2)
        inputs = pair(rng, n, m)
        found = session.run(inputs)
        if run % 10 == 0:
            assert_same(found, expected(model, inputs))
    assert fake_tensorrt.calls("cudaMalloc") == fake_tensorrt.calls("cudaMallocHost") == 0
    assert fake_tensorrt.calls("create_execution_context") == 0
    assert fake_tensorrt.calls("cudaGraphLaunch") > 50
    assert fake_tensorrt.live() == before


def test_memory_of_unknown_sizes_stays(tmp_path, fake_tensorrt):
    model, rng = t.kept(), np.random.default_rng(10)
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.KEPT))
    session.run({"x": np.ones(64, np.float32)})
    fake_tensorrt.set_faults()
    for _ in range(50):
        session.run({"x": rng.standard_normal(rng.integers(0, 65)).astype(np.float32)})
    assert fake_tensorrt.calls("cudaMalloc") == fake_tensorrt.calls("cudaMallocHost") == 0


def test_several_sessions_in_several_threads(tmp_path, fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA A100;8.0;12.8|NVIDIA A100;8.0;12.8")
    model = t.similarity()
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.SIMILARITY)
    sessions = [open_session(path, t.LoadRequest(f"cuda:{i % 2}")) for i in range(4)]
    assert [s.active.device for s in sessions[:2]] == ["cuda:0 NVIDIA A100", "cuda:1 NVIDIA A100"]
    problems = []

    def work(session, seed):
        rng = np.random.default_rng(seed)
        try:
            for n, m in [(5, 5)] * 6 + [(9, 3), (40, 40)] + [(5, 5)] * 6:
                inputs = pair(rng, n, m)
                assert_same(session.run(inputs), expected(model, inputs))
        except BaseException as error:  # told by the test's thread
            problems.append(error)

    threads = [threading.Thread(target=work, args=(s, i)) for i, s in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert fake_tensorrt.calls("cudaGraphLaunch") > 0


def test_one_session_in_several_threads(tmp_path, fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA A100;8.0;12.8|NVIDIA A100;8.0;12.8")
    model = t.similarity()
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.SIMILARITY)
    session, problems = open_session(path, t.LoadRequest("gpu:1")), []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(8):
                inputs = pair(rng, 4 + seed % 2, 6)
                assert_same(session.run(inputs), expected(model, inputs))
        except BaseException as error:  # told by the test's thread
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    session.close()
    assert not any(fake_tensorrt.live().values())


def test_a_collected_session_leaves_the_gpu_of_the_thread_alone(tmp_path, fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA A100;8.0;12.8|NVIDIA A100;8.0;12.8")
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, t.similarity(), t.SIMILARITY)
    session = open_session(path, t.LoadRequest("cuda:1"))
    session.run(pair(np.random.default_rng(11), 3, 3))
    fake_tensorrt.cuda.cudaSetDevice(0)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None and not any(fake_tensorrt.live().values())
    assert fake_tensorrt.cuda.cudaGetDevice()[1] == 0


def test_what_is_open_at_the_end_of_the_process_is_given_back(matcher):
    program = f"""
import atexit
from cuda.bindings import runtime
from fake_trt import objects
atexit.register(lambda: print(sum(runtime.live().values()), sum(objects.counts().values())))
from pathlib import Path
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.trt import TensorRt
session = TensorRt().load(Path({str(matcher[0])!r}), LoadRequest("cuda"))
assert runtime.live()["streams"] == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr


def test_a_closed_session_says_so_and_closes_twice(matcher, fake_tensorrt):
    session = open_session(matcher[0])
    session.close()
    session.close()
    with pytest.raises(BackendError, match="tensorrt 10.13.3.9 TensorRT: the session is closed"):
        session.run(pair(np.random.default_rng(12), 3, 3))
    assert not any(fake_tensorrt.live().values())


def test_numbers_that_are_not_finite(tmp_path, fake_tensorrt):
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, t.logarithm(), {}))
    with pytest.raises(NonFiniteError, match="2 of 4 in 'y'") as caught:
        session.run({"x": np.array([1, 0, -1, 1], np.float32)})
    np.testing.assert_array_equal(np.isfinite(caught.value.outputs["y"]), [True, False, False, True])
    assert session.run({"x": np.ones(4, np.float32)})["y"].tolist() == [0, 0, 0, 0]


def test_wrong_inputs_are_refused_before_the_gpu_hears_of_them(matcher, fake_tensorrt):
    session, rng = open_session(matcher[0]), np.random.default_rng(13)
    good = pair(rng, 3, 3)
    fake_tensorrt.set_faults()
    for bad in ({"a": good["a"]}, {**good, "a": good["a"][0]}, {**good, "a": good["a"].astype(np.float64)}):
        with pytest.raises(DataError):
            session.run(bad)
    assert fake_tensorrt.calls() == 0


def test_values_beyond_the_engine_name_its_limits(tmp_path, fake_tensorrt):
    session = open_session(place_engine(tmp_path / "e.engine", fake_tensorrt, t.first_rows(), t.FIRST_ROWS))
    x = np.ones((9, 4), np.float32)
    for n in (33, -1):
        with pytest.raises(
            BackendError, match=f"'n' of 0 to 32, got {n}: widen runtime.options.shapes, and run 'vslam"
        ):
            session.run({"x": x, "n": np.array([n])})
    assert session.run({"x": x, "n": np.array([2])})["rows"].shape == (2, 4)


def test_shapes_beyond_the_engine_name_its_limits(matcher):
    path, model = matcher
    session, rng = open_session(path), np.random.default_rng(14)
    with pytest.raises(BackendError) as caught:
        session.run(pair(rng, 41, 3))
    assert "was built for 'a' of 1x0x8 to 1x40x8, got 1x41x8: widen runtime.options.shapes" in str(caught.value)
    assert "outside of the profile" in str(caught.value)  # TensorRT's own words
    inputs = pair(rng, 3, 3)
    assert_same(session.run(inputs), expected(model, inputs))  # it goes on
