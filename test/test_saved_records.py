"""What ``models verify --reference R --inputs D`` leaves behind, and that no shorter gate overrules it."""

import json

import numpy as np
import pytest
from model_helpers import (
    TINY,
    _tiny_cache,  # noqa: F401
    card,
    command,
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features.artifacts import records
from vslam_features.artifacts.cases import matching
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.errors import ParityError
from vslam_features.models import Models
from vslam_features.runtimes.digest import input_digest

pytestmark = pytest.mark.usefixtures("tiny")
SAVED = 3


@pytest.fixture
def pairs(tmp_path):
    """A folder of saved pairs, and the fault of an engine that returns NaN on the second."""
    folder, fault = tmp_path / "saved", ""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for i in range(SAVED):
        d = rng.normal(size=(80, 64))
        d /= np.linalg.norm(d, axis=1, keepdims=True)
        inputs = matching([(rng.uniform(0, 200, (80, 2)), rows, (320, 240)) for rows in (d, d[::-1])])
        np.savez(folder / f"revisit-{i}.npz", **inputs)
        if i == 1:
            fault = input_digest(inputs)
    return folder, {"runtime__name": "fake", "runtime__options__nan_inputs": fault}


HONEST = {"runtime__name": "fake"}


def models(**values) -> Models:
    return Models(tiny_config(**values))


def reference() -> str:
    return str(model_path("tiny-matcher", "fp32"))


def kept() -> records.Record:
    found = records.records_of(content_sha256(model_path("tiny-matcher", "fp32")))
    return next(r for r in found if r.runtime == "fake(onnxruntime)")


def test_what_saved_pairs_found_is_kept_and_refuses_the_model_at_its_next_start(pairs):
    folder, broken = pairs
    assert models(**broken).verify("tiny-matcher").passed, "the pairs that ship do not show the fault"
    models(**broken).open("matcher", "tiny-matcher")
    report = models(**broken).verify("tiny-matcher", reference=reference(), inputs=[folder])
    assert not report.passed and len(report.rows) == 8 + SAVED and report.record.startswith("kept for cpu")
    assert [row.name for row in report.rows if row.problems] == ["revisit-1"]
    assert (kept().passed, kept().saved, kept().pairs) == (False, SAVED, 8 + SAVED)
    with pytest.raises(ParityError, match="on saved pairs .*revisit-1: .* NaN.* --inputs THEM"):
        models(**broken).open("matcher", "tiny-matcher")


def test_the_pairs_that_ship_do_not_overrule_saved_ones(pairs):
    folder, broken = pairs
    models(**broken).verify("tiny-matcher", reference=reference(), inputs=[folder])
    before = kept()
    report = models(**broken).verify("tiny-matcher")
    assert report.passed and "revisit-1" in report.objection and report.record == "stays as it was"
    assert kept() == before
    with pytest.raises(ParityError, match="revisit-1"):
        models(**broken).open("matcher", "tiny-matcher")
    mended = models(**HONEST).verify("tiny-matcher", reference=reference(), inputs=[folder])
    assert mended.passed and not mended.objection and kept().passed
    assert kept().summary.startswith(f"passed on {8 + SAVED} pairs ({SAVED} saved ones among them) against")
    models(**HONEST).open("matcher", "tiny-matcher")


def test_neither_does_the_gate_of_a_newer_version(pairs, monkeypatch):
    folder, broken = pairs
    models(**broken).verify("tiny-matcher", reference=reference(), inputs=[folder])
    monkeypatch.setattr(records, "GATE_VERSION", 10**6)
    with pytest.raises(ParityError, match="revisit-1"):
        models(**broken).open("matcher", "tiny-matcher")
    assert models(**broken).verify("tiny-matcher").objection
    assert models(**HONEST).verify("tiny-matcher", reference=reference(), inputs=[folder]).passed
    models(**HONEST).open("matcher", "tiny-matcher")


def test_neither_does_another_reference(pairs):
    """The fp32 file was fetched anew, so that the record is of a comparison with a file that is no longer there."""
    folder, broken = pairs
    half = save(
        matcher_model(least=0.601), card("matcher", "tiny-matcher", precision="fp16", features_model="tiny-features")
    )
    assert not models(**broken).verify(str(half), reference=reference(), inputs=[folder]).passed
    save(matcher_model(least=0.602), card("matcher", "tiny-matcher", features_model="tiny-features"))
    told = []
    with pytest.raises(ParityError, match="revisit-1"):
        Models(tiny_config(**HONEST), told.append).open("matcher", str(half))
    assert told == [], "nothing is compared that would change nothing"
    assert models(**HONEST).verify(str(half), reference=reference(), inputs=[folder]).passed
    models(**HONEST).open("matcher", str(half))


def test_a_passing_record_of_saved_pairs_is_kept_until_something_fails(pairs):
    folder, broken = pairs
    assert models(**HONEST).verify("tiny-matcher", reference=reference(), inputs=[folder]).passed
    before = kept()
    assert models(**HONEST).verify("tiny-matcher").passed and kept() == before
    everything = {"runtime__name": "fake", "runtime__options__nan_calls": "all"}
    assert not models(**everything).verify("tiny-matcher").passed
    assert (kept().passed, kept().saved) == (False, 0)
    assert models(**HONEST).verify("tiny-matcher").passed and kept().passed, (
        "as any gate that failed, without saved ones"
    )


def test_saved_pairs_alone_leave_the_record_as_it_is(pairs):
    folder, broken = pairs
    before = kept()
    report = models(**broken).verify("tiny-matcher", inputs=[folder])
    assert not report.passed and report.record.startswith("not kept: saved inputs alone") and len(report.rows) == SAVED
    assert kept() == before


def test_a_reference_that_is_not_the_one_of_a_start_leaves_no_record(pairs, tmp_path):
    """An fp16 file is compared with the fp32 file of its name, whatever somebody else compared it with."""
    folder, _ = pairs
    half = save(
        matcher_model(least=0.601), card("matcher", "tiny-matcher", precision="fp16", features_model="tiny-features")
    )
    other = save(matcher_model(least=0.65), card("matcher", "tiny-matcher"), tmp_path / "other.onnx")
    report = models().verify(str(half), reference=str(other), inputs=[folder])
    assert report.record == f"not kept: at start it is compared with {reference()}, not with what was named"
    assert records.records_of(content_sha256(half)) == []
    report = models().verify(str(half), reference=reference(), inputs=[folder])
    (record,) = records.records_of(content_sha256(half))
    assert report.passed and record.reference == content_sha256(model_path("tiny-matcher", "fp32"))
    ran = []
    Models(tiny_config(runtime__precision="fp16"), ran.append).open("matcher", "tiny-matcher")
    assert not any("parity pair" in line for line in ran), "the record serves"


def test_the_command(pairs, capsys):
    folder, broken = pairs
    settings = [f"{name.replace('__', '.')}={value}" for name, value in {**broken, "runtime__threads": 1}.items()]
    options = [part for setting in settings for part in ("--set", setting)]
    asked = ["models", "verify", "tiny-matcher", "--reference", reference(), "--inputs", str(folder), *options]
    assert command(*asked) == 1
    out = capsys.readouterr().out.splitlines()
    ours, theirs = (line for line in out if " saved " in line)
    assert ours.startswith("reference tiny-matcher.fp32.onnx on onnxruntime") and ours.count(" 0/3 ") == 2
    assert theirs.startswith("fake(onnxruntime)") and " 1/3 " in theirs
    assert out[-1].startswith("record: kept for cpu")
    assert command(*asked, "--json") == 1
    values = json.loads(capsys.readouterr().out)
    *_, ours, theirs = values["engines"]
    assert ours["matches"] == [80] * SAVED and theirs["nan"] == [1, SAVED] and values["record"].startswith("kept")
    assert command("models", "verify", "tiny-matcher", *options) == 1, "a start would refuse it"
    out = capsys.readouterr().out
    assert "PASSED" in out and "and yet it is refused: it failed on " in out and "record: stays as it was" in out


def test_records_of_the_schema_before_count_as_missing():
    """Without a complaint: what they say was found by another gate."""
    sha256 = content_sha256(model_path("tiny-matcher", "fp32"))
    for file in (records.cache_folder("records")).iterdir():
        values = json.loads(file.read_text())
        file.write_text(json.dumps({n: v for n, v in values.items() if n != "saved"} | {"schema": 2}))
    assert records.records_of(sha256) == []
    models().open("matcher", TINY["matcher.options.model"])
    assert [r.saved for r in records.records_of(sha256)] == [0]
