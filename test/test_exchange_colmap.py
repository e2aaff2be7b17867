"""COLMAP databases, read back by COLMAP itself (pycolmap), and by plain SQL where it is not installed."""

import sqlite3

import cv2
import numpy as np
import pytest
from exchange_helpers import keyframe, matches, pair, relative, scene_map, write_map
from helpers import CAMERA, IDENTITY, K, rotation

from vslam_features.camera import Camera
from vslam_features.errors import MapDamagedError, MapError
from vslam_features.exchange.colmap import export_colmap
from vslam_features.exchange.colmap_cameras import colmap_camera
from vslam_features.maps.reader import MapReader
from vslam_features.replay.scenes import make_scene
from vslam_features.types import MapEntry, MapModels, PairKind, Pose, Status


@pytest.fixture(scope="session")
def pycolmap():
    return pytest.importorskip("pycolmap", reason="pip install pycolmap (x86-64 wheels only)")


def export(path, entries, models=None, **options):
    """The database of a map with these entries."""
    source = write_map(path / "map.vmap", entries, models or MapModels(IDENTITY))
    with MapReader(source) as reader:
        export_colmap(reader, path / "colmap.db", **options)
    return path / "colmap.db"


def rows(path, sql):
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


CAMERAS = {
    "PINHOLE": Camera(640, 480, K),
    "OPENCV": Camera(640, 480, K, [-0.2, 0.05, 1e-3, -2e-3]),
    "FULL_OPENCV, k3": Camera(640, 480, K, [-0.2, 0.05, 1e-3, -2e-3, 0.01]),
    "FULL_OPENCV": Camera(640, 480, K, [0.4, 0.1, 1e-3, -2e-3, 0.01, 0.6, 0.05, 0.02], "rational_polynomial"),
    "OPENCV_FISHEYE": Camera(640, 480, K, [-0.05, 0.01, 2e-3, -1e-3], "equidistant"),
    "OPENCV, k3 is 0": Camera(640, 480, K, [-0.2, 0.05, 1e-3, -2e-3, 0.0]),
}


@pytest.mark.parametrize("name", CAMERAS)
def test_colmap_projects_as_our_camera_does_half_a_pixel_on(pycolmap, tmp_path, name):
    path = export(tmp_path, [MapEntry(keyframe(0, camera=CAMERAS[name]))])
    with pycolmap.Database.open(path) as db:
        (camera,) = db.read_all_cameras()
    assert camera.model.name == name.split(",")[0] and (camera.width, camera.height) == (640, 480)
    assert camera.has_prior_focal_length
    points = np.random.default_rng(0).uniform((-0.4, -0.3, 1), (0.4, 0.3, 1), (50, 3))
    ours = CAMERAS[name].project(points)
    theirs = np.array([camera.img_from_cam(point.reshape(3, 1)).reshape(2) for point in points])
    np.testing.assert_allclose(theirs, ours + 0.5, atol=1e-9)


def test_an_uncalibrated_image_gets_a_camera_a_size_that_colmap_refines(pycolmap, tmp_path):
    sizes = [(640, 480), (480, 640), (640, 480)]
    path = export(tmp_path, [MapEntry(keyframe(i, size=size)) for i, size in enumerate(sizes)])
    with pycolmap.Database.open(path) as db:
        cameras = {c.camera_id: c for c in db.read_all_cameras()}
        assert len(cameras) == 2
        for image, size in zip(sorted(db.read_all_images(), key=lambda i: i.image_id), sizes):
            camera = cameras[image.camera_id]
            assert (camera.width, camera.height) == size and not camera.has_prior_focal_length
            assert camera.model.name == "SIMPLE_RADIAL"
            np.testing.assert_allclose(camera.params, [768, size[0] / 2, size[1] / 2, 0])


def test_thin_prism_coefficients_are_refused():
    camera = Camera(640, 480, K, [0.1, 0, 0, 0, 0, 0, 0, 0, 0.01, 0, 0, 0], "rational_polynomial")
    with pytest.raises(MapError, match="thin prism"):
        colmap_camera(camera, (640, 480))


def test_images_keypoints_and_matches_are_those_of_the_map(pycolmap, tmp_path):
    first, second, third = (keyframe(i, camera=CAMERA) for i in range(3))
    fundamental = matches([(0, 3), (1, 4), (2, 5)], [True, False, True], model="fundamental")
    weak = matches([(5, 1), (6, 2)], [True, False], Status.TOO_FEW_INLIERS, model="fundamental")
    nothing = matches([], status=Status.NO_MATCHES)
    entries = [
        MapEntry(first),
        MapEntry(second, (pair(second, first, fundamental),)),
        MapEntry(third, (pair(third, second, weak), pair(third, first, nothing))),
    ]
    path = export(tmp_path, entries)
    with pycolmap.Database.open(path) as db:
        images = {i.image_id: i.name for i in db.read_all_images()}
        assert images == {1: "kf_000000.png", 2: "kf_000001.png", 3: "kf_000002.png"}
        for kf in (first, second, third):
            np.testing.assert_array_equal(db.read_keypoints(kf.id + 1)[:, :2], kf.features.keypoints + np.float32(0.5))
        # column 0 belongs to the image with the smaller id, which is the reference
        np.testing.assert_array_equal(db.read_matches(1, 2), [(3, 0), (4, 1), (5, 2)])
        np.testing.assert_array_equal(db.read_matches(2, 3), [(1, 5), (2, 6)])
        assert not db.exists_matches(1, 3) and db.num_matched_image_pairs() == 2
        assert db.num_verified_image_pairs() == 1
        geometry = db.read_two_view_geometry(1, 2)
        np.testing.assert_array_equal(geometry.inlier_matches, [(3, 0), (5, 2)])
        assert geometry.config == pycolmap.TwoViewGeometryConfiguration.UNCALIBRATED
        assert geometry.cam2_from_cam1 is None
        assert db.num_descriptors() == 0
    assert rows(path, "SELECT pair_id FROM matches ORDER BY pair_id") == [(2147483647 + 2,), (2 * 2147483647 + 3,)]


def test_of_two_pairs_of_the_same_keyframes_the_better_one_is_kept(tmp_path):
    first, second = keyframe(0), keyframe(1)
    track = matches([(0, 0), (1, 1)], model="fundamental")
    loop = matches([(i, i) for i in range(5)], model="fundamental")
    unverified = matches([(i, i) for i in range(9)], status=Status.AMBIGUOUS, model="fundamental")
    found = [pair(second, first, track), pair(second, first, loop, PairKind.LOOP)]
    found.append(pair(second, first, unverified, PairKind.LOOP))
    path = export(tmp_path, [MapEntry(first), MapEntry(second, tuple(found))])
    assert rows(path, "SELECT rows FROM matches") == [(5,)]
    assert rows(path, "SELECT rows, config FROM two_view_geometries") == [(5, 3)]


TRUTH = Pose(rotation((3, -10, 2)), np.array([0.8, -0.1, 0.59]) / np.linalg.norm([0.8, -0.1, 0.59]))


def two_calibrated(model="essential", pose=TRUTH, plane=False, camera=CAMERA):
    """Two keyframes of which the second sees the same 40 points from ``pose`` in the first."""
    rng = np.random.default_rng(0)
    points = rng.uniform((-1, -1, 4), (1, 1, 4 if plane else 8), (40, 3))
    from_first = (points - pose.t) @ pose.R
    first, second = keyframe(0, 40, camera), keyframe(1, 40, camera)
    first.features.keypoints[:] = camera.project(points)
    second.features.keypoints[:] = camera.project(from_first)
    found = matches([(i, i) for i in range(40)], model=model, pose=pose)
    return [MapEntry(first), MapEntry(second, (pair(second, first, found),))]


def test_the_pose_is_that_of_camera_2_from_camera_1_and_the_matrices_fit(pycolmap, tmp_path):
    path = export(tmp_path, two_calibrated())
    with pycolmap.Database.open(path) as db:
        geometry = db.read_two_view_geometry(1, 2)
        points1, points2 = (db.read_keypoints(i)[:, :2].astype(float) for i in (1, 2))
        (camera,) = db.read_all_cameras()
    assert geometry.config == pycolmap.TwoViewGeometryConfiguration.CALIBRATED
    found = geometry.cam2_from_cam1
    np.testing.assert_allclose(found.rotation.matrix(), TRUTH.R.T, atol=1e-12)
    np.testing.assert_allclose(found.translation, -TRUTH.R.T @ TRUTH.t, atol=1e-12)
    h1, h2 = (np.column_stack([p, np.ones(len(p))]) for p in (points1, points2))
    line = h1 @ geometry.F.T
    distance = np.abs((h2 * line).sum(axis=1)) / np.linalg.norm(line[:, :2], axis=1)
    assert distance.max() < 1e-3
    n1, n2 = (np.column_stack([camera.cam_from_img(p), np.ones(len(p))]) for p in (points1, points2))
    assert np.abs(((n1 @ geometry.E.T) * n2).sum(axis=1)).max() < 1e-5


def estimate(pycolmap, camera, points1, points2, found):
    """COLMAP's own two-view geometry of these matches, with its pose."""
    options = pycolmap.TwoViewGeometryOptions()
    options.compute_relative_pose = True
    return pycolmap.estimate_calibrated_two_view_geometry(camera, points1, camera, points2, found, options)


def test_colmap_estimates_the_pose_that_was_exported(pycolmap, tmp_path):
    path = export(tmp_path, two_calibrated())
    with pycolmap.Database.open(path) as db:
        (camera,) = db.read_all_cameras()
        points1, points2 = (db.read_keypoints(i)[:, :2].astype(float) for i in (1, 2))
        stored, found = db.read_two_view_geometry(1, 2), db.read_matches(1, 2)
    estimated = estimate(pycolmap, camera, points1, points2, found)
    difference = estimated.cam2_from_cam1.rotation.inverse() * stored.cam2_from_cam1.rotation
    assert np.degrees(difference.angle()) < 0.05
    directions = [
        g.cam2_from_cam1.translation / np.linalg.norm(g.cam2_from_cam1.translation) for g in (estimated, stored)
    ]
    assert directions[0] @ directions[1] > np.cos(np.radians(0.2))


@pytest.mark.parametrize(
    "camera", [CAMERA, CAMERAS["OPENCV"], CAMERAS["OPENCV_FISHEYE"]], ids=["pinhole", "opencv", "fisheye"]
)
def test_distorted_pairs_have_an_essential_matrix_and_a_fundamental_one_only_without_distortion(
    pycolmap, tmp_path, camera
):
    path = export(tmp_path, two_calibrated(camera=camera))
    with pycolmap.Database.open(path) as db:
        geometry = db.read_two_view_geometry(1, 2)
    assert geometry.E is not None and (geometry.F is not None) == (camera is CAMERA)


@pytest.mark.parametrize(
    "pose, name",
    [(TRUTH, "PLANAR"), (Pose(TRUTH.R, np.zeros(3)), "PANORAMIC"), (None, "PLANAR_OR_PANORAMIC")],
    ids=["plane", "rotation", "either"],
)
def test_a_homography_is_told_as_what_it_is(pycolmap, tmp_path, pose, name):
    entries = two_calibrated("homography", pose or TRUTH, plane=True)
    if pose is None:
        (p,) = entries[1].pairs
        object.__setattr__(p.matches, "pose", None)
    path = export(tmp_path, entries)
    with pycolmap.Database.open(path) as db:
        geometry = db.read_two_view_geometry(1, 2)
        points1, points2 = (db.read_keypoints(i)[:, :2].astype(float) for i in (1, 2))
    assert geometry.config == getattr(pycolmap.TwoViewGeometryConfiguration, name)
    moved = cv2.perspectiveTransform(points1[None], geometry.H)[0]
    assert np.abs(moved - points2).max() < 1e-2
    assert geometry.E is None and (geometry.cam2_from_cam1 is None) == (pose is None)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """(scene, frames, database of the map) of a walk through a rendered room."""
    folder = tmp_path_factory.mktemp("room")
    scene, frames = make_scene("room", width=480, height=360), list(range(0, 30, 3))
    scene_map(folder / "map.vmap", scene, frames)
    with MapReader(folder / "map.vmap") as reader:
        assert export_colmap(reader, folder / "colmap.db") == len(frames)
    return scene, frames, folder / "colmap.db"


def test_colmap_agrees_with_the_truth_of_a_rendered_scene(pycolmap, room):
    scene, frames, path = room
    with pycolmap.Database.open(path) as db:
        (camera,) = db.read_all_cameras()
        errors = []
        for first, second in ((i, i + step) for step in (1, 2, 3) for i in range(len(frames) - step)):
            if not db.exists_two_view_geometry(first + 1, second + 1):
                continue
            points1, points2 = (db.read_keypoints(i + 1)[:, :2].astype(float) for i in (first, second))
            found, stored = db.read_matches(first + 1, second + 1), db.read_two_view_geometry(first + 1, second + 1)
            estimated = estimate(pycolmap, camera, points1, points2, found)
            assert len(estimated.inlier_matches) > 0.8 * len(stored.inlier_matches)
            truth = relative(scene, frames[first], frames[second])  # camera 1 in camera 2
            for geometry in (estimated, stored):
                R = geometry.cam2_from_cam1.rotation.matrix() if geometry.cam2_from_cam1 else np.eye(3)
                errors.append(np.degrees(np.arccos(np.clip((np.trace(R.T @ truth.R) - 1) / 2, -1, 1))))
        theirs, ours = errors[::2], errors[1::2]
        assert len(ours) > 15 and np.median(theirs) < 1 and np.median(ours) < 0.2, (theirs, ours)
        # COLMAP compares bytes as the map compares floats: the same partners
        assert db.num_descriptors() == db.num_keypoints()
        d1, d2 = (np.asarray(db.read_descriptors(i).data, np.float32) for i in (1, 2))
        similarity = (d1 @ d2.T) / (np.linalg.norm(d1, axis=1)[:, None] * np.linalg.norm(d2, axis=1))
        found = db.read_matches(1, 2)
        assert (similarity[found[:, 0]].argmax(axis=1) == found[:, 1]).mean() > 0.99


def test_colmap_reconstructs_a_rendered_room(pycolmap, room, tmp_path):
    """The whole way: cameras, keypoints and verified pairs give COLMAP the true walk."""
    scene, frames, path = room
    database = tmp_path / "colmap.db"
    database.write_bytes(path.read_bytes())
    options = pycolmap.IncrementalPipelineOptions()
    options.ba_refine_focal_length = options.ba_refine_extra_params = False
    models = pycolmap.incremental_mapping(database, tmp_path, tmp_path / "model", options)
    model = max(models.values(), key=lambda m: m.num_reg_images())
    assert model.num_reg_images() == len(frames)
    assert model.compute_mean_reprojection_error() < 1.0
    found = {i.name: i.projection_center() for i in model.images.values()}
    walked = np.array([found[f"kf_{k:06d}.png"] for k in range(len(frames))])
    truth = np.array([scene.poses[i].t for i in frames])
    error, scale = aligned_error(walked, truth)
    assert error < 0.02 and scale > 0


def aligned_error(points, truth):
    """RMS distance in metres after the best similarity transform (Umeyama, PAMI 1991)."""
    a, b = points - points.mean(axis=0), truth - truth.mean(axis=0)
    U, S, Vt = np.linalg.svd(b.T @ a)
    D = np.diag([1, 1, np.sign(np.linalg.det(U @ Vt))])
    scale = (S * np.diag(D)).sum() / (a**2).sum()
    return float(np.sqrt((((scale * a @ (U @ D @ Vt).T) - b) ** 2).sum(axis=1).mean())), scale


def test_the_same_map_gives_the_same_bytes(tmp_path):
    entries = two_calibrated()
    first = export(tmp_path, entries).read_bytes()
    (tmp_path / "again").mkdir()
    assert export(tmp_path / "again", entries).read_bytes() == first


def test_an_existing_target_is_kept_unless_told(tmp_path):
    (tmp_path / "colmap.db").write_bytes(b"mine")
    with pytest.raises(MapError, match="there already"):
        export(tmp_path, two_calibrated())
    assert (tmp_path / "colmap.db").read_bytes() == b"mine"
    with MapReader(tmp_path / "map.vmap") as reader:
        export_colmap(reader, tmp_path / "colmap.db", overwrite=True)
    assert rows(tmp_path / "colmap.db", "SELECT count(*) FROM images") == [(2,)]


def test_nothing_is_left_of_an_export_that_fails(tmp_path):
    kf, ref = keyframe(1, 5), keyframe(0, 5)
    beyond = matches([(0, 0), (1, 77)], model="fundamental")
    with pytest.raises(MapDamagedError, match=r"map\.vmap: table matches, pair 1-0"):
        export(tmp_path, [MapEntry(ref), MapEntry(kf, (pair(kf, ref, beyond),))])
    assert [p.name for p in tmp_path.iterdir() if "colmap" in p.name] == []


def test_interrupted_by_its_progress_it_leaves_nothing(tmp_path):
    seen = []

    def stop(done, total):
        seen.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, two_calibrated(), progress=stop)
    assert seen == [(1, 2)] and [p.name for p in tmp_path.iterdir() if "colmap" in p.name] == []


def test_an_empty_map_is_an_empty_database(pycolmap, tmp_path):
    with pycolmap.Database.open(export(tmp_path, [])) as db:
        assert db.num_images() == 0
