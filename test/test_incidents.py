"""Incidents and parity records: what is written, what is bounded, and what damaged files do."""

import itertools
import json
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.artifacts import incidents, records
from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.cases import saved_cases
from vslam_features.artifacts.gate import ParityReport, TensorRow
from vslam_features.artifacts.incidents import Incidents
from vslam_features.errors import DataError
from vslam_features.runtimes.base import Active

SHA, SOURCE = "ab" * 32, "cd" * 32
CARD = ModelCard("matcher", "lighterglue", "Apache-2.0", SOURCE)
ACTIVE = Active("onnxruntime", "1.32.0", "CPUExecutionProvider", "cpu Xeon")
INPUTS = {"keypoints0": np.arange(8, dtype=np.float32).reshape(4, 2), "image_size0": np.array([640, 480], np.float32)}
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(box, fault="outputs are not finite: 3 of 4 in 'mscores0'", **changes):
    fields = {"role": "matcher", "name": "lighterglue", "sha256": SHA, "runtime": "fake 1", "outputs": None}
    return box.save(**{**fields, "fault": fault, "inputs": INPUTS, **changes})


# -- incidents -----------------------------------------------------------------------------


def test_an_incident_comes_back_as_it_was(tmp_path):
    outputs = {"mscores0": np.array([np.nan, 1, np.inf, 0], np.float32), "matches0": np.array([-1, 2, 0, 1])}
    path = save(Incidents(tmp_path / "new" / "folder"), outputs=outputs)
    incident = incidents.load(path)
    assert (incident.role, incident.name, incident.sha256) == ("matcher", "lighterglue", SHA)
    assert incident.fault.startswith("outputs are not finite") and incident.runtime == "fake 1"
    assert incident.time.endswith("Z") and len(incident.time) == 20
    for saved, given_ in ((incident.inputs, INPUTS), (incident.outputs, outputs)):
        assert sorted(saved) == sorted(given_)
        for name, value in given_.items():
            assert saved[name].dtype == value.dtype
            np.testing.assert_array_equal(saved[name], value)
    with np.load(path, allow_pickle=False) as data:  # any reader of .npz files can look at it
        assert json.loads(str(data["meta"]))["name"] == "lighterglue"
    (case,) = saved_cases([path.parent])
    assert sorted(case.runs[0]) == sorted(INPUTS) and case.expected is None


def test_a_fault_at_30_hz_does_not_write_30_files_a_second(tmp_path):
    box = Incidents(tmp_path)
    paths = [save(box, f"outputs are not finite: {i} of 4") for i in range(30)]
    assert sum(p is not None for p in paths) == len(box.files()) == 1 and box.skipped == 29
    assert save(box, "CUDA error: out of memory") is not None, "another kind of fault does not wait"
    assert save(box, sha256="ef" * 32) is not None, "nor does another model"


@pytest.mark.parametrize(
    "faults",
    [
        [f"bad alloc at {hex(0x7F3A00000000 + 37 * i)}" for i in range(500)],
        [f"bad alloc at 0x{0xABCDEF + 4096 * i:016X}" for i in range(500)],
        [f"no kernel {0xBEEF00D + 977 * i:09x} in the cache" for i in range(500)],
        [f"error {10.0 ** -(i % 9)} over {2.5 * i}" for i in range(500)],
    ],
    ids=["address", "padded address", "hash", "floats"],
)
def test_faults_at_other_addresses_are_of_one_kind(tmp_path, faults):
    box = Incidents(tmp_path)
    assert [save(box, fault) is not None for fault in faults] == [True] + [False] * 499


def test_words_that_could_be_hexadecimal_are_words(tmp_path):
    box = Incidents(tmp_path)
    assert save(box, "the facade failed") is not None and save(box, "the decade failed") is not None


def test_messages_that_all_differ_are_bounded_in_time_too(tmp_path, monkeypatch):
    """Ten files in ten seconds, whatever the messages; what is remembered of them is bounded as well."""
    now = 1000.0
    monkeypatch.setattr(incidents.time, "monotonic", lambda: now)
    box, written = Incidents(tmp_path), 0
    words = ["".join(c) for c in itertools.product("ghijk", repeat=4)]  # letters that are no digits
    for i, word in enumerate(words[:600]):
        now = 1000.0 + i / 30
        written += save(box, f"failed in {word}") is not None
    assert written == 20 and box.skipped == 580, "20 s at 30 Hz"
    assert len(box._last) <= incidents.KINDS
    now += 100
    assert save(box, "failed in ghij") is not None, "after a quiet time there is room again"
    assert len(box._last) == 1


def test_the_number_is_bounded_and_the_first_of_each_kind_stays_longest(tmp_path):
    box = Incidents(tmp_path, max_count=4, interval_s=0)
    first = save(box, "kind A")
    newer = [save(box, "kind A") for _ in range(5)]
    other = save(box, "kind B")
    assert len(box.files()) == 4
    assert first in box.files() and other in box.files() and newer[-1] in box.files() and newer[0] not in box.files()
    kinds = [save(box, f"kind {letter}") for letter in "CDEFG"]
    assert box.files() == sorted(kinds[-4:]), "where all are the first of their kind the oldest goes"


def test_the_size_is_bounded(tmp_path):
    box = Incidents(tmp_path, max_count=100, max_mb=0.1, interval_s=0)
    big = {"image": np.zeros((1, 1, 100, 100), np.float32)}  # 40 kB
    paths = [save(box, inputs=big) for _ in range(6)]
    assert all(paths) and sum(p.stat().st_size for p in tmp_path.iterdir()) <= 0.1 * 2**20
    assert paths[-1] in box.files() and paths[0] in box.files()
    assert save(box, inputs={"image": np.zeros((1, 1, 300, 300), np.float32)}) is None, "larger than the limit"
    assert len(box.files()) == 2


def test_none_are_written_where_none_are_wanted(tmp_path):
    assert save(Incidents(tmp_path / "x", max_count=0)) is None
    assert not (tmp_path / "x").exists()


def test_another_process_finds_what_is_there(tmp_path):
    first = save(Incidents(tmp_path, interval_s=0))
    second = save(Incidents(tmp_path, interval_s=0))
    assert "-first" in first.name and "-first" not in second.name


def test_a_full_disk_is_logged_and_counted_and_no_more(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    box = Incidents(tmp_path, interval_s=0)
    monkeypatch.setattr(incidents, "place", full)
    with caplog.at_level(logging.ERROR):
        assert save(box) is None
    assert box.failed == 1 and "No space left" in caplog.text
    (tmp_path / "file").write_text("")
    assert save(Incidents(tmp_path / "file" / "below")) is None
    assert save(Incidents(tmp_path), inputs={"a": np.array([object()])}) is None
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".npz"]


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    mine = tmp_path / "mine.npz"
    mine.write_bytes(b"x" * 10**6)
    box = Incidents(tmp_path, max_count=1, max_mb=0.1, interval_s=0)
    save(box), save(box)
    assert mine.exists() and len(box.files()) == 1


def test_several_threads_may_save(tmp_path):
    box = Incidents(tmp_path, max_count=8, interval_s=0)
    threads = [threading.Thread(target=lambda: [save(box) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(box.files()) == 8 and box.failed == 0
    assert all(incidents.load(p).name == "lighterglue" for p in box.files())


@pytest.mark.parametrize("name", ["../../etc/passwd", "ä ö/ü", "x" * 300, ""])
def test_names_of_models_cannot_leave_the_folder(tmp_path, name):
    path = save(Incidents(tmp_path / "in"), name=name)
    assert path.parent == tmp_path / "in" and incidents.load(path).name == name


@FUZZ
@given(st.data())
def test_damaged_files_raise_one_error_that_names_them(tmp_path, data):
    path, good = tmp_path / "damaged.npz", tmp_path / "good"
    if not good.exists():
        save(Incidents(good), outputs={"matches0": np.array([1, 2])})
    content = bytearray(next(good.iterdir()).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path.write_bytes(content)
    for reader in (incidents.load, incidents.load_inputs):
        try:
            reader(path)
        except DataError as error:
            assert "damaged.npz" in str(error)


@FUZZ
@given(st.binary(max_size=300))
def test_what_is_no_npz_raises_one_error(tmp_path, content):
    path = tmp_path / "some.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="some.npz"):
        incidents.load(path)


@pytest.mark.parametrize("meta", ["{}", "[]", "not JSON", '{"role": "matcher"}', "1"])
def test_a_wrong_description_is_named(tmp_path, meta):
    np.savez(tmp_path / "a.npz", meta=np.array(meta))
    with pytest.raises(DataError, match=r"a\.npz.*description"):
        incidents.load(tmp_path / "a.npz")


def test_pickles_and_single_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", a=np.array([{"x": 1}], object))
    np.save(tmp_path / "s.npy", np.zeros(3))
    np.savez(tmp_path / "e.npz")
    for name in ("p.npz", "s.npy", "e.npz"):
        with pytest.raises(DataError, match=name):
            incidents.load_inputs(tmp_path / name)


# -- records -------------------------------------------------------------------------------


def report(reasons=(), reference="golden", precision="fp32"):
    tensor = TensorRow("mscores0", 1e-6, 2e-6, "cup", 1e-5, 1.0)
    return ParityReport("matcher", "lighterglue", precision, reference, (), (tensor,), tuple(reasons), 1.5)


def test_a_record_is_found_again(tmp_path):
    assert records.find(SHA, CARD, ACTIVE, folder=tmp_path) is None
    saved = records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path / "new")
    assert records.find(SHA, CARD, ACTIVE, folder=tmp_path / "new") == saved
    assert saved.passed and saved.reference == "golden" and saved.source_sha256 == SOURCE
    assert saved.figures == {"mscores0": {"rms": 1e-6, "max_error": 1e-5, "cosine": 1.0}}
    assert "golden outputs" in saved.summary
    failed = records.save(report(["cup: no match"], "session"), SHA, CARD, ACTIVE, "ef" * 32, folder=tmp_path)
    assert not failed.passed and failed.reference == "ef" * 32 and failed.summary == "failed: cup: no match"
    assert records.find(SHA, CARD, ACTIVE, folder=tmp_path) == failed


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "00" * 32},
        {"active": replace(ACTIVE, version="1.33.0")},
        {"active": replace(ACTIVE, runtime="openvino")},
        {"active": replace(ACTIVE, provider="CUDAExecutionProvider")},
        {"active": replace(ACTIVE, device="cuda:0 Orin")},
        {"precision": "bf16"},
    ],
)
def test_a_record_holds_for_one_file_runtime_and_device(tmp_path, change):
    records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path)
    fields = {"sha256": SHA, "card": CARD, "active": ACTIVE, "folder": tmp_path}
    assert records.find(**fields) is not None
    assert records.find(**{**fields, **change}) is None


def test_a_note_of_the_session_changes_nothing(tmp_path):
    records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path)
    assert records.find(SHA, CARD, replace(ACTIVE, note="cuda was asked for"), folder=tmp_path) is not None


def test_another_version_of_the_gate_or_its_golden_outputs_asks_again(tmp_path, monkeypatch):
    records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path)
    monkeypatch.setattr(records, "GATE_VERSION", 10**6)
    assert records.find(SHA, CARD, ACTIVE, folder=tmp_path) is None
    monkeypatch.undo()
    golden_card = replace(CARD, source_sha256=records.golden.load("lighterglue").meta["source_sha256"])
    assert records.gate_id(golden_card) != records.gate_id(CARD)
    assert records.gate_id(replace(CARD, features_model="others")) != records.gate_id(CARD)  # other pairs


def test_a_passing_record_links_a_file_to_its_weights(tmp_path):
    assert not records.links(SHA, SOURCE, folder=tmp_path / "none")
    records.save(report(["cup: no match"]), SHA, CARD, ACTIVE, folder=tmp_path)
    assert not records.links(SHA, SOURCE, folder=tmp_path)
    records.save(report(), SHA, CARD, replace(ACTIVE, runtime="openvino"), folder=tmp_path)
    assert records.links(SHA, SOURCE, folder=tmp_path)
    assert not records.links(SHA, "00" * 32, folder=tmp_path)
    assert not records.links(SHA[:16] + "0" * 48, SOURCE, folder=tmp_path)
    assert len(records.records_of(SHA, tmp_path)) == 2


def test_a_record_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path / "file" / "below").passed
    assert "cannot be kept" in caplog.text


def test_a_record_renamed_to_serve_another_model_is_not_taken(tmp_path):
    records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path)
    records.save(report(["cup: no match"]), "00" * 32, CARD, ACTIVE, folder=tmp_path)
    good, bad = sorted(tmp_path.glob(SHA[:16] + "*"))[0], sorted(tmp_path.glob("0" * 16 + "*"))[0]
    bad.write_bytes(good.read_bytes())
    assert records.find("00" * 32, CARD, ACTIVE, folder=tmp_path) is None


@FUZZ
@given(st.data())
def test_damaged_records_count_as_missing(tmp_path, data):
    saved = records.save(report(), SHA, CARD, ACTIVE, folder=tmp_path)
    (path,) = tmp_path.glob("*.json")
    values = json.loads(path.read_text())
    kind = data.draw(st.sampled_from(["bytes", "field", "drop", "cut", "any"]))
    if kind == "bytes":
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
    elif kind == "any":
        path.write_bytes(data.draw(st.binary(max_size=200)))
    else:
        name = data.draw(st.sampled_from(sorted(values)))
        if kind == "drop":
            del values[name]
        else:
            values[name] = data.draw(st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()))
        path.write_text(json.dumps(values))
    found = records.find(SHA, CARD, ACTIVE, folder=tmp_path)
    assert found is None or (found.sha256, found.passed) == (SHA, saved.passed)
    records.links(SHA, SOURCE, folder=tmp_path)


def test_a_record_cannot_pass_with_reasons(tmp_path):
    records.save(report(["cup: no match"]), SHA, CARD, ACTIVE, folder=tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text().replace('"passed": false', '"passed": true'))
    assert records.find(SHA, CARD, ACTIVE, folder=tmp_path) is None
