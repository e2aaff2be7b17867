"""``~/save_map``, ``~/load_map``, ``~/set_localization``: the running map is stored and exchanged while images flow."""

from __future__ import annotations

from collections.abc import Callable

from rclpy.node import Node
from std_srvs.srv import SetBool, Trigger

from ..errors import ConfigError, MapError
from ..map_keeper import MapKeeper
from .slow_services import SlowServices, Work


class MapServices:
    """There in every state of the node; while it has no map they say so.

    Args:
        node: has the parameter ``map_path``.
        used: called in the services' thread with the ``map_path`` that a map was saved to or loaded from.
    """

    def __init__(self, node: Node, used: Callable[[str], None]):
        self._node, self._used = node, used
        self._keeper: MapKeeper | None = None
        self._services = SlowServices(node)
        self._services.add(Trigger, "~/save_map", self._save)
        self._services.add(Trigger, "~/load_map", self._load)
        self._services.add(SetBool, "~/set_localization", self._set_localization)

    @property
    def busy(self) -> bool:
        """Somebody waits for an answer."""
        return self._services.busy

    def attach(self, keeper: MapKeeper) -> None:
        """The node is configured and has a map."""
        self._keeper = keeper

    def detach(self) -> None:
        """The map is about to be closed: let the call at hand end."""
        self._keeper = None
        self._services.settle()

    def close(self) -> None:
        """End the thread. Call it when the executor does not spin any more."""
        self.detach()
        self._services.close()

    def _save(self, request) -> Work:
        keeper, path = self._map(), self._path("to save to")

        def save() -> str:
            text = keeper.save(path)
            self._used(path)
            return text

        return save

    def _load(self, request) -> Work:
        keeper, path = self._map(), self._path("to load")

        def load() -> str:
            text = keeper.load(path)
            self._used(path)
            return text

        return load

    def _set_localization(self, request) -> Work:
        keeper = self._map()
        return lambda: keeper.set_localization(request.data)

    def _map(self) -> MapKeeper:
        if self._keeper is None:
            raise MapError("the node is not configured and has no map: configure it, and call again")
        return self._keeper

    def _path(self, what: str) -> str:
        path = self._node.get_parameter("map_path").value
        if not path:
            name = self._node.get_fully_qualified_name()
            raise ConfigError(
                f"map_path is empty: set it to the file {what} (ros2 param set {name} map_path FILE), and call again"
            )
        return path
