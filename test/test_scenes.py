"""Synthetic scenes: their geometry and images against computations that share no code with them."""

import cv2
import numpy as np
import pytest

from vslam_features.errors import ConfigError, DataError
from vslam_features.replay.ground_truth import GroundTruth
from vslam_features.replay.render import Renderer
from vslam_features.replay.scenes import SCENES, SceneOptions, make_scene
from vslam_features.replay.textures import mip_pyramid
from vslam_features.replay.worlds import CORRIDOR, ROOM, TWIN, Surface, World
from vslam_features.types import Pose

SMALL = SceneOptions(width=320, height=240)
TINY = SceneOptions(width=96, height=64, num_frames=6)


@pytest.fixture(scope="module")
def room():
    return make_scene("room", SMALL)


@pytest.fixture(scope="module")
def corridor():
    return make_scene("corridor", SMALL, fps=5)


@pytest.fixture(scope="module")
def twins():
    return make_scene("twin_rooms", SMALL, fps=5)


@pytest.fixture
def scene(request):
    return request.getfixturevalue({"room": "room", "corridor": "corridor", "twin_rooms": "twins"}[request.param])


def pixel_grid(scene):
    width, height = scene.camera.size
    return np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1).reshape(-1, 2).astype(float)


def slab(origin, directions, low, high):
    """Where rays enter and leave an axis-aligned box."""
    with np.errstate(divide="ignore"):
        a, b = (low - origin) / directions, (high - origin) / directions
    return np.minimum(a, b).max(1), np.maximum(a, b).min(1)


BOXES = {
    "room": [
        [(3.5, 2.6, 0), (4.6, 3.3, 0.9)], [(0, 2.2, 0), (0.45, 3.4, 1.8)],
        [(5.2, 5.6, 0), (6.6, 6.0, 1.2)], [(7.3, 0.5, 0), (7.6, 0.8, 2.8)],
    ],
    "corridor": [
        [(1.8, 1.8, 0), (7.2, 5.2, 2.6)], [(5.6, 0, 0), (6.5, 0.25, 1.1)], [(8.75, 3, 0), (9, 3.8, 1.9)],
        [(2.6, 5.2, 0), (3.4, 5.4, 0.9)], [(0, 4, 0), (0.2, 4.6, 1.4)],
    ],
}  # fmt: skip
HALLS = {"room": ROOM, "corridor": (*CORRIDOR["outer"], CORRIDOR["height"])}


@pytest.mark.parametrize("scene", ["room", "corridor"], indirect=True)
def test_depth_is_the_analytic_distance_to_boxes_and_walls(scene):
    pixels = pixel_grid(scene)
    rays = np.column_stack([pixels, np.ones(len(pixels))]) @ np.linalg.inv(scene.camera.K).T
    for i in (0, len(scene) // 3, len(scene) - 5):
        pose = scene.poses[i]
        directions = rays @ pose.R.T
        expected = slab(pose.t, directions, np.zeros(3), np.array(HALLS[scene.name]))[1]
        for low, high in BOXES[scene.name]:
            enter, leave = slab(pose.t, directions, np.array(low), np.array(high))
            expected = np.where((enter < leave) & (enter > 0), np.minimum(expected, enter), expected)
        depth = scene.depth(i)
        assert depth.dtype == np.float32 and depth.shape == scene.camera.size[::-1]
        off = np.abs(depth.ravel() / expected - 1) > 1e-4
        assert off.mean() < 1e-3  # f32 rays may pass an edge on the other side


@pytest.mark.parametrize("scene", SCENES, indirect=True)
def test_correspondences_agree_with_projected_depth(scene):
    i = len(scene) // 4
    j, pixels, (width, height) = i + 3, pixel_grid(scene)[::7], scene.camera.size
    a, b, z = scene.poses[i], scene.poses[j], scene.depth(i)[pixels[:, 1].astype(int), pixels[:, 0].astype(int)]
    local = (
        np.column_stack([(pixels - scene.camera.K[:2, 2]) / scene.camera.K[0, 0], np.ones(len(pixels))]) * z[:, None]
    )
    points = local @ a.R.T + a.t
    projected, _ = cv2.projectPoints(points, cv2.Rodrigues(b.R.T)[0], -b.R.T @ b.t, scene.camera.K, None)
    projected, depth = projected.reshape(-1, 2), ((points - b.t) @ b.R)[:, 2]
    found = scene.correspondences(i, j, pixels)
    seen = np.isfinite(found[:, 0])
    assert 0.3 < seen.mean() < 1
    error = np.linalg.norm(found - projected, axis=1)[seen]
    assert np.quantile(error, 0.99) < 0.01

    inside = (depth > 0) & (projected >= 0).all(1) & (projected <= (width - 1, height - 1)).all(1)
    at = np.rint(np.where(inside[:, None], projected, 0)).astype(int)
    clear = inside & (depth < scene.depth(j)[at[:, 1], at[:, 0]] * 1.02)
    assert (seen != clear)[inside].mean() < 0.01
    assert not seen[(projected < -1).any(1) | (projected > (width, height)).any(1)].any()


@pytest.mark.parametrize("distance", [1.0, 2.5, 6.0])
def test_pixels_and_texture_are_where_the_convention_says(distance):
    """A bright dot of the texture appears where its centre projects to, at all mip levels, tilted and not."""
    size, K = (2.0, 1.5), np.array([[300.0, 0, 159.5], [0, 300, 119.5], [0, 0, 1]])
    texture = np.zeros((300, 400), np.uint8)
    texture[92:104, 235:247] = 200  # centre at pixel (240.5, 97.5): 241 / 200 m right, 98 / 200 m down
    for angle, tolerance in ((0.0, 0.03), (0.5, 0.1)):  # perspective moves the middle of a tilted dot a little
        u = np.array([np.cos(angle), 0, np.sin(angle)])  # map = optical frame of an identity pose
        wall = Surface("t", "wall", np.array([-1.0, -0.75, distance]), u, np.array([0.0, 1, 0]), size)
        pyramid = mip_pyramid(texture)
        image = Renderer(World((wall,), {"t": pyramid}), K, (320, 240)).image([Pose(np.eye(3), np.zeros(3))])
        y, x = np.mgrid[:240, :320]
        centre = np.array([(image * x).sum(), (image * y).sum()]) / image.sum()
        point = K @ (wall.origin + u * 241 / 200 + wall.v * 98 / 200)
        assert np.abs(centre - point[:2] / point[2]).max() < tolerance

        flat = {"t": [np.full_like(level, 200) for level in pyramid]}
        image = Renderer(World((wall,), flat), K, (320, 240)).image([Pose(np.eye(3), np.zeros(3))])
        corners = wall.origin + np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * size @ np.stack([u, wall.v])
        corners = corners @ K.T
        if distance > 2:  # wholly in view: its grey sum is its area
            area = cv2.contourArea((corners[:, :2] / corners[:, 2:]).astype(np.float32))
            assert image.sum() / 200 == pytest.approx(area, rel=0.01)


@pytest.mark.parametrize("scene", SCENES, indirect=True)
def test_closed_worlds_have_no_holes(scene):
    assert all((scene.depth(i) > 0.05).all() for i in range(0, len(scene), 7))


def test_a_corner_hides_what_is_behind_it(corridor):
    truth = corridor.ground_truth(grid=(8, 6))
    opposite = len(corridor) // 3  # on the far side of the solid core
    assert truth.covisibility[0, opposite] == 0
    assert corridor.covisibility(0, opposite) == 0
    assert np.isnan(corridor.correspondences(0, opposite, corridor._grid((16, 12)))).all()


@pytest.mark.parametrize("scene", SCENES, indirect=True)
def test_warped_images_agree_in_grey(scene):
    i = len(scene) // 5
    first, second, pixels = scene.frame(i).image, scene.frame(i + 1).image, pixel_grid(scene)
    target = scene.correspondences(i, i + 1, pixels).astype(np.float32).reshape(*first.shape, 2)
    seen = np.isfinite(target[..., 0])
    warped = cv2.remap(second, np.nan_to_num(target), None, cv2.INTER_LINEAR)
    difference = np.abs(first.astype(int) - warped)[seen]
    assert np.median(difference) <= 4
    assert np.abs(first[seen].mean() - warped[seen].mean()) < 1
    unaligned = np.abs(first.astype(int) - second)[seen]
    assert difference.mean() < 0.35 * unaligned.mean()


def sift_errors(scene, i, j):
    """Distances in pixels of SIFT's ratio-test matches from the true correspondences."""
    sift = cv2.SIFT_create()
    (k0, d0), (k1, d1) = (sift.detectAndCompute(scene.frame(n).image, None) for n in (i, j))
    matches = [a for a, b in cv2.BFMatcher().knnMatch(d0, d1, k=2) if a.distance < 0.8 * b.distance]
    source = np.array([k0[m.queryIdx].pt for m in matches])
    target = np.array([k1[m.trainIdx].pt for m in matches])
    return np.linalg.norm(scene.correspondences(i, j, source) - target, axis=1)


@pytest.mark.parametrize("scene", SCENES, indirect=True)
def test_sift_tracks_between_neighbours(scene):
    for i in (2, len(scene) // 2):
        errors = sift_errors(scene, i, i + 1)
        assert np.nanmedian(errors) < 0.5
        assert (errors < 2).sum() > 150


def test_corridor_comes_back_to_true_loops_that_match(corridor):
    truth = corridor.ground_truth()
    loops = truth.true_loops(min_gap_frames=len(corridor) // 2)
    assert (loops == loops.T).all() and not loops.diagonal().any()
    assert loops[-30:].any(axis=1).all()  # the second lap is all known
    middle = slice(len(corridor) // 2 - 10, len(corridor) // 2 + 10)
    assert not loops[middle].any()
    i = len(corridor) - 10
    j = int(np.argmax(np.where(loops[i], truth.covisibility[i], 0)))
    assert truth.is_true(corridor.stamps_ns[i], corridor.stamps_ns[j])
    assert not truth.is_true(corridor.stamps_ns[i], corridor.stamps_ns[len(corridor) // 2])
    assert (sift_errors(corridor, i, j) < 2).sum() > 150
    assert truth.covisibility[i, j] == pytest.approx(corridor.covisibility(i, j), abs=1e-6)


def test_twin_rooms_look_the_same_and_share_nothing(twins):
    moved = [p.t - twins.poses[0].t for p in twins.poses]
    offset = next(k for k, d in enumerate(moved) if np.allclose(d, [TWIN["pitch"], 0, 0], atol=1e-9))
    truth = twins.ground_truth()
    visit = len(twins) - offset
    for i in (0, visit // 4, visit // 2, visit - 1):
        assert np.allclose(twins.poses[i].R, twins.poses[i + offset].R)
        a, b = (twins.frame(n).image.astype(int) for n in (i, i + offset))
        assert np.abs(a - b).max() <= 1
    assert visit > 50 and (truth.covisibility[:visit, offset:] == 0).all()
    assert not truth.true_loops(1, 0.01, 180)[:visit, offset:].any()


def test_same_seed_same_bytes_other_seed_other_images():
    first, again, other = (make_scene("room", TINY, seed=s, noise_sigma=3, exposure_s=0.02) for s in (5, 5, 6))
    assert (first.frame(3).image == again.frame(3).image).all()
    assert [f.image.tobytes() for f in first.frames()] == [f.image.tobytes() for f in again]
    assert (first.frame(3).image != other.frame(3).image).mean() > 0.8


def test_noise_has_its_sigma_and_is_new_in_each_frame(room):
    noisy = make_scene("room", SMALL, noise_sigma=4.0)
    residuals = []
    for i in (10, 11):
        clean = room.frame(i).image.astype(float)
        inner = (clean > 20) & (clean < 235)
        residuals.append(np.where(inner, noisy.frame(i).image - clean, np.nan))
        assert np.nanstd(residuals[-1]) == pytest.approx(4.0, rel=0.05)
        assert abs(np.nanmean(residuals[-1])) < 0.1
    both = np.isfinite(residuals).all(axis=0)
    assert abs(np.corrcoef(residuals[0][both], residuals[1][both])[0, 1]) < 0.05


def test_motion_blur_softens_but_does_not_move(room):
    blurred = make_scene("room", SMALL, exposure_s=0.08)
    sharp, soft = room.frame(20).image, blurred.frame(20).image
    assert cv2.Laplacian(soft, cv2.CV_64F).var() < 0.5 * cv2.Laplacian(sharp, cv2.CV_64F).var()
    shift, _ = cv2.phaseCorrelate(sharp.astype(float), soft.astype(float))
    assert np.hypot(*shift) < 0.5


def test_exposure_steps_change_the_mean():
    plain = make_scene("room", TINY)
    stepped = make_scene("room", TINY, exposure_steps=((2, 0.5), (4, 1.2)))
    gains = [stepped.frame(i).image.mean() / plain.frame(i).image.mean() for i in range(6)]
    assert gains == pytest.approx([1, 1, 0.5, 0.5, 1.2, 1.2], rel=0.03)


@pytest.mark.parametrize("name", SCENES)
def test_stamps_poses_and_camera(name):
    scene = make_scene(name, width=64, height=48, fps=30)
    stamps = np.array(scene.stamps_ns)
    assert stamps[0] == 1760000000123456789 and stamps[30] == stamps[0] + 10**9
    assert set(np.diff(stamps)) <= {33333333, 33333334}
    frame = scene.frame(7)
    assert (frame.stamp_ns, frame.frame_id) == (scene.stamps_ns[7], "camera_optical")
    assert frame.camera is scene.camera and frame.pose is scene.poses[7] and frame.pose.frame_id == "map"
    assert scene.camera.rectified and np.allclose(scene.camera.K[:2, 2], (31.5, 23.5))
    t, R = np.stack([p.t for p in scene.poses]), np.stack([p.R for p in scene.poses])
    assert np.allclose(R @ R.transpose(0, 2, 1), np.eye(3)) and np.allclose(np.linalg.det(R), 1)
    assert (R[:, 2, 1] < -0.95).all()  # the image's down is down
    assert np.linalg.norm(np.diff(t, axis=0), axis=1).max() * 30 < 1.6
    turns = np.arccos(np.clip((np.einsum("nij,nij->n", R[1:], R[:-1]) - 1) / 2, -1, 1))
    assert np.degrees(turns).max() * 30 < 75


def test_frame_limit_and_wrong_requests_are_named():
    scene = make_scene("room", TINY)
    assert len(scene) == len(list(scene)) == 6
    for call, error, text in [
        (lambda: make_scene("garden"), ConfigError, "room, corridor, twin_rooms"),
        (lambda: make_scene("room", colour=True), ConfigError, "noise_sigma"),
        (lambda: make_scene("room", num_frames=100_000), ConfigError, "raise fps or rounds"),
        (lambda: SceneOptions(noise_sigma=-1), ConfigError, "noise_sigma"),
        (lambda: SceneOptions(fps=float("nan")), ConfigError, "fps"),
        (lambda: SceneOptions(exposure_steps=((3, -1.0),)), ConfigError, "exposure_steps"),
        (lambda: scene.frame(6), DataError, "0 to 5"),
        (lambda: scene.frame(-1), DataError, "0 to 5"),
        (lambda: scene.correspondences(0, 9, np.zeros((1, 2))), DataError, "frame 9"),
        (lambda: scene.correspondences(0, 1, np.zeros(2)), DataError, r"\(N, 2\)"),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_ground_truth_file_round_trips_and_damage_is_named(tmp_path):
    truth = make_scene("room", TINY).ground_truth()
    truth.save(tmp_path / "ground_truth.npz")
    for path in (tmp_path, tmp_path / "ground_truth.npz"):
        back = GroundTruth.load(path)
        assert (back.scene, back.image_size) == ("room", (96, 64))
        for name in ("stamps_ns", "positions", "rotations", "K", "covisibility"):
            a, b = getattr(back, name), getattr(truth, name)
            assert a.dtype == b.dtype and (a == b).all()
    with pytest.raises(DataError, match="no frame has stamp 5"):
        back.index(5)
    data = (tmp_path / "ground_truth.npz").read_bytes()
    for damaged in (b"", data[: len(data) // 2], b"no zip"):
        (tmp_path / "bad.npz").write_bytes(damaged)
        with pytest.raises(DataError, match="bad.npz"):
            GroundTruth.load(tmp_path / "bad.npz")
    np.savez(tmp_path / "bad.npz", scene=np.array({"a": 1}, dtype=object))
    with pytest.raises(DataError, match="bad.npz"):
        GroundTruth.load(tmp_path / "bad.npz")
    with pytest.raises(DataError, match="nowhere"):
        GroundTruth.load(tmp_path / "nowhere.npz")
