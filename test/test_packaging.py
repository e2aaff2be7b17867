"""The package builds and installs in the ways that README names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXECUTABLES = {"frontend_node", "player_node", "recorder_node", "vslam-features"}


def run(*command, cwd, **env) -> str:
    result = subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the tracked and new files, as a user's workspace has them."""
    out = tmp_path_factory.mktemp("ws") / "src" / "vslam_features"
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, out / name)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--symlink-install"]], ids=["plain", "symlink"])
def test_colcon_build(checkout, tmp_path, options):
    colcon = Path(sys.executable).with_name("colcon")
    if not colcon.exists():
        pytest.skip("colcon is not installed beside this Python: pip install 'vslam_features[dev]'")
    run(colcon, "build", "--base-paths", checkout, *options, cwd=tmp_path)
    prefix = tmp_path / "install" / "vslam_features"
    assert {p.name for p in (prefix / "lib" / "vslam_features").iterdir()} == EXECUTABLES
    share = prefix / "share" / "vslam_features"
    for name in ("launch/looper.launch.py", "config/default.yaml", "config/fastdds.xml", "models/registry.yaml"):
        assert (share / name).exists(), name
    assert (prefix / "share/ament_index/resource_index/packages/vslam_features").exists()
    code = (
        "import vslam_features, vslam_features.share as s, vslam_features.retrieval.vlad as v;"
        "print(vslam_features.__file__); print(s.share_path('config/fastdds.xml')); v.load_codebook('sift')"
    )
    where = run("bash", "-c", f'. install/local_setup.bash && {sys.executable} -c "{code}"', cwd=tmp_path).split()
    assert all(str(ROOT) not in path for path in where), "the build's own copy is what runs"


@pytest.mark.slow
def test_wheel_holds_data_and_commands(checkout, tmp_path):
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        checkout,
        cwd=tmp_path,
    )
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = checkout / "vslam_features"
    data = [f for folder in ("codebooks", "golden") for f in (package / folder).iterdir()]
    assert {"vlad_xfeat.npz", "vlad_aliked-n16.npz", "xfeat.npz", "pairs.json", "cup_0.png"} <= {f.name for f in data}
    missing = {f"vslam_features/{f.relative_to(package)}" for f in data} - set(names)
    assert not missing
    for end in ("replay/report.html.j2", "config/default.yaml", "vslam_features/models/registry.yaml"):
        assert any(name.endswith(end) for name in names), end


def test_no_page_has_a_placeholder():
    """Where figures are measured last, ``@@NAME@@`` stands for them meanwhile."""
    pages = run("git", "ls-files", "*.md", cwd=ROOT).split()
    assert len(pages) > 5
    assert not [page for page in pages if "@@" in (ROOT / page).read_text(encoding="utf-8")]


def test_package_xml_names_every_imported_message_package():
    declared = {e.text for e in ET.parse(ROOT / "package.xml").getroot() if e.tag.endswith("depend")}
    used = set()
    for path in (ROOT / "vslam_features").rglob("*.py"):
        used |= set(re.findall(r"^\s*from (\w+)\.(?:msg|srv) import", path.read_text(), re.M))
    assert used and used <= declared, used - declared


def test_versions_agree():
    import vslam_features

    assert ET.parse(ROOT / "package.xml").getroot().findtext("version") == vslam_features.__version__
    assert re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text())[1] == vslam_features.__version__


def test_codebooks_are_small():
    sizes = [p.stat().st_size for p in (ROOT / "vslam_features" / "codebooks").glob("*.npz")]
    assert len(sizes) >= 2 and sum(sizes) < 300_000


def test_readme_dependency_table_names_every_dependency():
    text, readme = (ROOT / "setup.py").read_text(), (ROOT / "README.md").read_text()
    required = re.search(r"install_requires=\[(.*?)\]", text, re.S)[1]
    for name in re.findall(r'"([a-z0-9-]+)[>=;"]', required):
        assert f"| {name}" in readme, name
