"""registry.py: built-in and installed plug-ins."""

import pytest
from helpers import plugin_distribution

from vslam_features import registry
from vslam_features.config import Config
from vslam_features.errors import ConfigError, PluginError
from vslam_features.features.base import FeatureExtractor
from vslam_features.matching.base import Matcher
from vslam_features.retrieval.base import GlobalDescriptor, Index

BASES = {"features": FeatureExtractor, "matcher": Matcher, "global": GlobalDescriptor, "index": Index}


@pytest.mark.parametrize("role, base", BASES.items())
def test_every_builtin_loads_and_is_what_its_role_says(role, base):
    for name in registry._BUILTIN[role]:
        assert issubclass(registry.get(role, name), base)


def test_unknown_roles_and_names_list_the_choices():
    with pytest.raises(PluginError, match="unknown plug-in role 'feature'.*features, matcher, global, index, runtime"):
        registry.names("feature")
    with pytest.raises(
        PluginError, match="unknown features plug-in 'surf'; choose one of: aliked, flexglue, orb, sift"
    ):
        registry.get("features", "surf")


MODULE = """
from dataclasses import dataclass
from vslam_features.matching.nearest import Nearest

class Mine(Nearest):
    pass

class Bare:
    pass

class NoDefault:
    @dataclass
    class Options:
        must: int

class NotADataclass:
    class Options:
        pass
"""


def test_an_installed_plugin_is_found_by_its_entry_point(tmp_path, monkeypatch):
    plugin_distribution(tmp_path, monkeypatch, {"matcher": {"mine": "Mine"}, "index": {"other": "Mine"}}, MODULE)
    assert registry.names("matcher") == ["flexglue", "lighterglue", "lightglue", "mine", "nearest"] and registry.names(
        "index"
    ) == [
        "faiss",
        "flat",
        "other",
    ]
    assert registry.get("matcher", "mine").__name__ == "Mine"
    assert Config.from_flat({"matcher.name": "mine"}).matcher.options["ratio"] == 0.8


def test_a_builtin_name_cannot_be_taken_over(tmp_path, monkeypatch):
    plugin_distribution(tmp_path, monkeypatch, {"matcher": {"nearest": "Mine"}}, MODULE)
    assert registry.get("matcher", "nearest").__name__ == "Nearest"


@pytest.mark.parametrize(
    "value, source, cause",
    [
        ("Mine", "import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("Mine", "raise OSError('libfoo.so: cannot open')", "OSError: libfoo.so"),
        ("Mine", "1 +", "SyntaxError"),
        ("Absent", MODULE, "AttributeError"),
        ("Bare", MODULE, "Options"),
        ("NoDefault", MODULE, "must"),
        ("NotADataclass", MODULE, "must be a dataclass with defaults"),
    ],
)
def test_a_broken_plugin_is_named_with_the_cause(tmp_path, monkeypatch, value, source, cause):
    plugin_distribution(tmp_path, monkeypatch, {"matcher": {"broken": value}}, source)
    with pytest.raises(PluginError, match="matcher plug-in 'broken'") as error:
        registry.get("matcher", "broken")
    assert cause in str(error.value)
    with pytest.raises((PluginError, ConfigError), match="broken"):
        Config.from_flat({"matcher.name": "broken"})
    assert Config().matcher.name == "lighterglue"
