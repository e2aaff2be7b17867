"""Lifecycle node ``frontend``: parses parameters, converts, calls the core, publishes. No algorithm in here."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import replace

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from std_srvs.srv import SetBool, Trigger

from ..config import Config
from ..errors import ConfigError, MapError, ModelError, VslamFeaturesError
from ..frontend import FrontEnd
from ..map_keeper import MapKeeper, check_map
from .diagnostics import Diagnostics, failed_message, starting_message
from .frames import FrameBuilder
from .inputs import Inputs, image_topic
from .logs import RosHandler
from .map_services import MapServices
from .outputs import Outputs
from .pairing import Pairing
from .parameters import Parameters
from .pipeline import Pipeline
from .poses import ApproximatePoses, InterpolatedPoses
from .process import run
from .statistics import Statistics

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
DISCOVERY_S = 2.0
"""Subscribers that are there know a new publisher within this time, also on a busy machine."""


class FrontEndNode(LifecycleNode):
    """Images in, keyframes, matches and loops out; see ``docs/topics.md``.

    unconfigured -> (configure: front-end, map, publishers, services,
    diagnostics) -> inactive -> (activate: threads, subscriptions) -> active.
    Callbacks run in one thread and only hand over. Deactivating puts all
    keyframes on the disk, cleaning up closes the map. The services of the map
    are there in every state.
    """

    failure = ""

    def __init__(self, **options):
        super().__init__("frontend", automatically_declare_parameters_from_overrides=True, **options)
        self._settings = Parameters(self, active=lambda: self._inputs is not None)
        self._inputs: Inputs | None = None
        self._starting = False
        self._clear()
        self._map_services = MapServices(self, used=self._path_used)
        self._log_handler = RosHandler(self.get_logger())
        self._core_log = logging.getLogger("vslam_features")
        self._core_log.addHandler(self._log_handler)
        self._core_log.setLevel(logging.DEBUG)  # the node's own logger filters

    def start(self, stop: threading.Event) -> None:
        """Configure and activate, where ``autostart``. Raises VslamFeaturesError where that fails."""
        if self._settings.autostart:
            self._starting = True
            for verb, trigger in (("configure", self.trigger_configure), ("activate", self.trigger_activate)):
                if trigger() != SUCCESS:
                    raise ConfigError(f"{verb} failed: {self._error}")
            self._starting = False

    @property
    def busy(self) -> bool:
        """A service is at work."""
        return self._map_services.busy

    def stop(self) -> None:
        """Leave the states one by one, whichever the node is in."""
        self._deactivate()
        self._cleanup()
        self._map_services.close()
        self._core_log.removeHandler(self._log_handler)

    # -- lifecycle -------------------------------------------------------------------------

    def on_configure(self, state) -> TransitionCallbackReturn:
        """Build everything from the parameters; nothing is left behind where a part fails."""
        return self._guarded("configure", lambda: self._configure(self._checked()), undo=self._cleanup)

    def on_activate(self, state) -> TransitionCallbackReturn:
        """Start threads, then subscribe. Parameters changed since configure are taken over, with new keyframes."""
        result = self._guarded("activate", self._refresh, undo=lambda: None)
        if result == SUCCESS:
            result = super().on_activate(state)
        if result == SUCCESS:
            result = self._guarded("activate", self._activate, undo=self._deactivate)
            if result != SUCCESS:
                super().on_deactivate(state)
        return result

    def on_deactivate(self, state) -> TransitionCallbackReturn:
        """Unsubscribe, finish what is at hand, and put all keyframes on the disk."""
        self._deactivate()
        return super().on_deactivate(state)

    def on_cleanup(self, state) -> TransitionCallbackReturn:
        """Close the map and remove publishers, services and timers."""
        self._cleanup()
        return SUCCESS

    def on_shutdown(self, state) -> TransitionCallbackReturn:
        """Deactivate and clean up."""
        self._deactivate()
        self._cleanup()
        return SUCCESS

    def on_error(self, state) -> TransitionCallbackReturn:
        """After an unexpected exception: back to unconfigured, with nothing left behind."""
        return self.on_shutdown(state)

    def _guarded(self, verb: str, step, undo) -> TransitionCallbackReturn:
        """Run a transition. rclpy drops exceptions of transitions silently, so they are logged here."""
        try:
            step()
            return SUCCESS
        except VslamFeaturesError as error:
            self._error = str(error)
        except Exception as error:  # a plug-in's constructor may fail in any way
            self._error = f"{type(error).__name__}: {error}"
            self._core_log.debug("%s failed", verb, exc_info=True)
        undo()
        if not self._starting:  # else the process ends with this as its one line
            self.get_logger().error(f"{verb} failed: {self._error}")
        return FAILURE

    # -- steps -----------------------------------------------------------------------------

    def _clear(self) -> None:
        self._error = ""
        self._config: Config | None = None
        self._statistics = self._pipeline = self._pairing = self._outputs = self._inputs = self._keeper = None
        self._diagnostics = self._diagnostics_publisher = None
        self._own_services, self._own_timers = [], []
        self._known = False  # to its subscribers: the publisher of diagnostics

    def _checked(self) -> Config:
        config = self._settings.config()
        if config != self._config:  # else the map is open, whatever has become of its folder
            check_map(config)
        return config

    def _configure(self, config: Config) -> None:
        self._config = config
        self._statistics = Statistics()
        poses = None
        if config.pose_type != "none":
            poses = InterpolatedPoses() if config.sync == "exact" else ApproximatePoses(config.sync_slop_s)

        name = self.get_fully_qualified_name().lstrip("/")
        # So deep that progress reaches also a subscriber that notices this publisher a little later.
        self._diagnostics_publisher = self.create_publisher(DiagnosticArray, "/diagnostics", 100)
        frontend = self._make_frontend(config)
        self._outputs = outputs = Outputs(self)
        self._pipeline = Pipeline(
            frontend,
            FrameBuilder(config, image_topic(self, config), self._statistics),
            self._statistics,
            on_tracked=lambda result: outputs.tracked(result, frontend.keyframes.__getitem__),
            on_loops=lambda result: outputs.loops(result, frontend.keyframes.__getitem__),
            restart=lambda forget: self._keeper.reset(forget),
        )
        self._keeper = MapKeeper(frontend, between_frames=self._pipeline.between_frames, exchanged=outputs.reset)
        self.get_logger().info(f"map: {self._keeper.start()}")
        self._map_services.attach(self._keeper)
        self._pairing = Pairing(self._pipeline.put, poses)
        self._diagnostics = Diagnostics(name, self._statistics, frontend, self._keeper.status)
        self._own_services = [
            self.create_service(Trigger, "~/reset", self._on_reset),
            self.create_service(SetBool, "~/pause", self._on_pause),
        ]
        # Wall time: simulated time may stand still, and then the user needs the diagnostics most.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._own_timers = [
            self.create_timer(1.0, self._on_second, clock=steady),
            self.create_timer(0.05, self._pairing.release, clock=steady),
        ]

    def _make_frontend(self, config: Config) -> FrontEnd:
        try:
            return FrontEnd(config, self._starting_up)
        except ModelError as error:
            self._tell(failed_message, str(error))
            # What follows takes the publisher away.
            self._diagnostics_publisher.wait_for_all_acked(Duration(seconds=DISCOVERY_S))
            raise

    def _starting_up(self, text: str) -> None:
        """Models are verified at their first use on a machine, which takes seconds: somebody waits for them."""
        self.get_logger().info(text)
        self._tell(starting_message, text)

    def _tell(self, message, text: str) -> None:
        """Publish diagnostics of a node that is not configured yet."""
        if not self._known:
            self._wait_for_subscribers()
            self._known = True
        name, stamp = self.get_fully_qualified_name().lstrip("/"), self.get_clock().now().to_msg()
        self._diagnostics_publisher.publish(message(stamp, name, text))

    def _wait_for_subscribers(self) -> None:
        """What a new publisher sends is lost to those that do not know it yet."""
        end = time.monotonic() + DISCOVERY_S
        while not self._diagnostics_publisher.get_subscription_count() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)  # they know it a little later than it knows them

    def _refresh(self) -> None:
        config, old = self._checked(), self._config
        if config != old:
            self.get_logger().warning("parameters changed since configure: configuring again, with a new session")
            self._cleanup()
            try:
                self._configure(config)
            except Exception:  # still configured, as before: so diagnostics and services stay
                self._cleanup()
                self._configure(old)
                raise

    def _activate(self) -> None:
        self._outputs.start()
        self._pipeline.start()
        self._pairing.forget_gap()
        self._inputs = Inputs(self, self._config, self._pairing)
        topics = ", ".join(f"{t.label}: {t.name}" for t in self._inputs.topics)
        c = self._pipeline.frontend.config
        self.get_logger().info(f"active with {c.features.name} + {c.matcher.name}; listening to {topics}")

    def _deactivate(self) -> None:
        was_active = self._inputs is not None
        if was_active:
            self._inputs.destroy()
            self._inputs = None
            self._pairing.flush()
        if self._pipeline is not None:
            self._pipeline.stop()
            self._outputs.stop()
        if was_active:
            try:
                self._keeper.flush()
            except MapError as error:
                self.get_logger().error(f"not all keyframes are on the disk: {error}")
            self._outputs.publish_markers(unheard=True)  # the last for those who come while it is inactive

    def _cleanup(self) -> None:
        self._map_services.detach()
        if self._keeper is not None:
            try:
                self._keeper.close()
            except MapError as error:
                self.get_logger().error(f"keyframes are lost: {error}")
        for timer in self._own_timers:
            self.destroy_timer(timer)
        for service in self._own_services:
            self.destroy_service(service)
        if self._diagnostics_publisher is not None:
            self.destroy_publisher(self._diagnostics_publisher)
        if self._outputs is not None:
            self._outputs.destroy()
        error = self._error
        self._clear()
        self._error = error

    def _path_used(self, path: str) -> None:
        """What a service used is no change that would configure the node again at its next activation."""
        self._config = replace(self._config, map_path=path)

    # -- callbacks -------------------------------------------------------------------------

    def _on_second(self) -> None:
        state = "active" if self._inputs else "inactive"
        self._diagnostics_publisher.publish(
            self._diagnostics.message(
                self.get_clock().now().to_msg(), state, self._pairing, self._pipeline, self._inputs
            )
        )
        if self._inputs:
            self._outputs.publish_markers()
            if self._inputs.other_body:
                self.get_logger().warning(self._inputs.other_body, once=True)

    def _on_reset(self, request, response):
        """Images that came before the call still belong to the old keyframes."""
        if self._inputs is None:
            response.message = "not active: nothing was reset"
            return response
        status = self._keeper.status()
        self._pairing.reset()
        response.success = True
        if status.mode == "mapping":
            stay = f"; they stay in {status.path}" if status.path and status.keyframes else ""
            if stay and status.problem:
                stay = f"; {status.stored} stay in {status.path}, others are lost unless that ends: {status.problem}"
            response.message = f"{status.keyframes} keyframes are forgotten; ids count from 0 again{stay}"
        else:
            count = status.keyframes - status.first_id
            response.message = f"{count} keyframes are forgotten; ids go on behind the map's {status.first_id}"
        self.get_logger().info(f"reset: {response.message}")
        return response

    def _on_pause(self, request, response):
        if self._inputs is None:
            response.message = "not active: nothing to pause"
            return response
        if self._inputs.paused and not request.data:
            self._pairing.forget_gap()
        self._inputs.paused = request.data
        response.success = True
        response.message = "paused: images are ignored" if request.data else "images are processed"
        return response


def main(args: list[str] | None = None) -> int:
    """Entry point ``frontend_node``."""
    return run(FrontEndNode, "frontend", args)


if __name__ == "__main__":
    sys.exit(main())
