"""The configuration of a command that is about one matcher model."""

from __future__ import annotations

from ..config import Config
from ..errors import PluginError
from .common import load_config


def config_of_matcher(args, model: str | None) -> tuple[Config, frozenset[str]]:
    """The configuration with the plug-ins that suit a matcher's model, and the dotted names that were given on purpose.

    Args:
        args: with the arguments of ``add_config_arguments``.
        model: name, or path of its file; None: that of the configuration.
    Raises:
        ConfigError, ModelError. PluginError: the matcher that was chosen runs no model.
    """
    from .. import registry
    from ..artifacts.card import read_card
    from ..artifacts.store import locate

    config, given = load_config(args)
    if model:
        wanted = read_card(locate(model, config.runtime.precision)).features_model
        made = [name for name in registry.names("features") if _features_model(name) == wanted]
        if made and "features.name" not in given and _features_model(config.features.name) != wanted:
            suits = {"features.name": made[0], "matcher.name": registry.get("features", made[0]).default_matcher}
            args.set[:0] = [f"{name}={value}" for name, value in suits.items() if name not in given]
            config, given = load_config(args)
        if "model" not in config.matcher.options:
            raise PluginError(
                f"{model}: matcher '{config.matcher.name}' runs no model: name the plug-in that does with "
                "--set matcher.name=..., such as lighterglue"
            )
        config = Config.from_flat({"matcher.options.model": model}, base=config)
    # Another method in the place of a missing model would be taken for it.
    return config.with_values(models__if_missing="error"), given


def _features_model(plugin: str) -> str:
    """The name that cards of matchers call the features of a plug-in by."""
    from .. import registry

    return getattr(registry.get("features", plugin).Options(), "model", plugin)
