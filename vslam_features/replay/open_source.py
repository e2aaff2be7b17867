"""A recording or a folder of images, opened by path."""

from __future__ import annotations

from pathlib import Path

from ..camera import Camera
from ..config import Config
from ..errors import BagError
from .bag_source import BagSource
from .image_source import ImageSource
from .source import BAG_SUFFIXES, IMAGE_SUFFIXES, Source


def open_source(
    path,
    config: Config | None = None,
    *,
    image_topic: str | None = None,
    camera_info_topic: str | None = None,
    pose_topic: str | None = None,
    use_pose: bool = True,
    camera: Camera | tuple | None = None,
    fps: float = 10.0,
    explicit: frozenset[str] = frozenset(),
) -> Source:
    """Open a rosbag2 folder, a bare ``.mcap``/``.db3``, a ROS 1 ``.bag`` or a folder of images.

    Args:
        config: defaults where None.
        image_topic, camera_info_topic, pose_topic: found by themselves where None.
        use_pose: False leaves poses out.
        camera: of an image folder: a Camera, or (fx, fy, cx, cy) in pixels.
        fps: images a second that synthetic stamps of a folder stand for.
        explicit: dotted names that the user set: folder defaults do not override them.
    Raises:
        BagError: nothing readable is there, with the next step.
    """
    path, config = Path(path), config or Config()
    if not path.exists():
        raise BagError(f"{path}: no such file or folder; give a rosbag2 folder, .mcap, .db3, .bag or an image folder")
    topics = {"image_topic": image_topic, "camera_info_topic": camera_info_topic, "pose_topic": pose_topic}
    if _is_image_folder(path):
        given = [f"--{k.replace('_', '-')}" for k, v in topics.items() if v]
        if given:
            raise BagError(f"{path}: is a folder of images and has no topics; leave out {', '.join(given)}")
        return ImageSource(path, config, camera=camera, fps=fps, explicit=explicit)
    if camera is not None:
        raise BagError(f"{path}: --camera is for image folders; a recording brings its camera_info topic")
    return BagSource(path, config, **topics, use_pose=use_pose)


def _is_image_folder(path: Path) -> bool:
    """True for a folder of images, False for a recording. Raises BagError for neither."""
    if path.is_file():
        if path.suffix in BAG_SUFFIXES:
            return False
        hint = "give the folder that holds it" if path.suffix.lower() in IMAGE_SUFFIXES else "expected " + _EXPECTED
        raise BagError(f"{path}: not a recording by its name; {hint}")
    if (path / "metadata.yaml").exists():
        return False
    names = sorted(p.name for p in path.iterdir() if p.is_file())
    bags = [n for n in names if n.endswith(BAG_SUFFIXES) or n.endswith((".mcap.zstd", ".db3.zstd"))]
    if any(n.lower().endswith(IMAGE_SUFFIXES) for n in names):
        return True
    if bags:
        bare = next((n for n in bags if n.endswith(BAG_SUFFIXES)), None)
        direct = f", or read the file itself: {path / bare}" if bare else ""
        raise BagError(
            f"{path}: has {', '.join(bags[:3])} but no metadata.yaml (the recorder was killed, or it was not copied); "
            f"make one with 'ros2 bag reindex {path}'{direct}"
        )
    inside = sorted(p.name for p in path.iterdir() if p.is_dir())
    look = f"; there are the folders {', '.join(inside[:5])}: did you mean one of them?" if inside else ""
    raise BagError(f"{path}: neither images nor a recording in it, expected {_EXPECTED}{look}")


_EXPECTED = "a folder with metadata.yaml, a .mcap, .db3 or .bag file, or a folder with " + ", ".join(IMAGE_SUFFIXES)
