"""geometry.py on exact two-view data, and its formulas against the books and OpenCV."""

import cv2
import numpy as np
import pytest
from helpers import CAMERA, K, rotation, two_views
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features.camera import Camera
from vslam_features.config import GeometryConfig
from vslam_features.errors import PluginError
from vslam_features.geometry import Verifier
from vslam_features.plane_pose import plane_poses, resolved_pose
from vslam_features.solvers import OpenCv, make_solver
from vslam_features.two_view import fundamental_of, gric, homography_error, pose_difference_deg, sampson_error
from vslam_features.types import Pose, Status

try:
    import poselib  # noqa: F401

    SOLVERS = ["poselib", "opencv"]
except ImportError:
    SOLVERS = ["opencv"]
each_solver = pytest.mark.parametrize("solver", SOLVERS)
OLD_USAC = tuple(int(v) for v in cv2.__version__.split(".")[:2]) < (4, 6)  # keeps fewer inliers

BARREL = Camera(640, 480, K, [-0.3, 0.1, 1e-3, -1e-3])
FISHEYE = Camera(640, 480, K, [-0.01, 0.02, -0.01, 0.002], "equidistant")


def verify(p0, p1, camera=CAMERA, **config):
    return Verifier(GeometryConfig(**config)).verify(np.array(p0, float), np.array(p1, float), camera, camera)


# -- known poses -------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize(
    "motion",
    [
        {},
        {"t": (0.4, -0.3, 0.2), "rotation_deg": (-5, 3, 20)},
        {"t": (0, 0, -0.6), "rotation_deg": (0, 0, 0)},  # forward
        {"t": (0.05, 0.02, 0.6), "rotation_deg": (1, -1, 0)},  # backward
        {"t": (-0.8, 0, 0.3), "rotation_deg": (0, 15, 0), "depth": (3, 30)},
    ],
)
@pytest.mark.parametrize("outliers", [0.0, 0.3, 0.6])
def test_the_true_pose_is_recovered(solver, motion, outliers):
    view = two_views(300, outliers=outliers, **motion)
    found = view.verify(solver=solver)
    assert (found.status, found.model) == (Status.OK, "essential")
    turned, direction = view.errors_deg(found.pose)
    assert turned < 0.3 and direction < 2
    assert np.linalg.norm(found.pose.t) == pytest.approx(1) and not found.pose.scale_known
    assert found.inliers[view.right].mean() > (0.6 if OLD_USAC else 0.95)
    assert found.inliers[~view.right].mean() < 0.1 if outliers else True


@each_solver
@pytest.mark.parametrize("cameras", [(BARREL, BARREL), (FISHEYE, FISHEYE), (BARREL, FISHEYE), (CAMERA, BARREL)])
def test_distorted_and_mixed_cameras(solver, cameras):
    view = two_views(200, outliers=0.2, camera0=cameras[0], camera1=cameras[1])
    found = view.verify(solver=solver)
    assert found.status is Status.OK and max(view.errors_deg(found.pose)) < 2
    assert found.inliers[view.right].mean() > (0.6 if OLD_USAC else 0.95)


@each_solver
def test_the_pose_is_image_0s_camera_in_image_1s(solver):
    view = two_views(t=(-0.5, 0, 0), rotation_deg=(0, 0, 0))  # camera 1 moved to the right, so 0 lies to its left
    assert view.verify(solver=solver).pose.t[0] < -0.99


@each_solver
def test_planes_pure_rotations_and_equal_images_are_verified_without_a_translation(solver):
    plane = two_views(plane=True, outliers=0.3).verify(solver=solver)
    assert (plane.status, plane.model, plane.pose) == (Status.OK, "homography", None)
    turn = two_views(t=(0, 0, 0), rotation_deg=(3, 10, -4), outliers=0.3)
    found = turn.verify(solver=solver)
    assert (found.status, found.model) == (Status.OK, "homography")
    assert not found.pose.t.any() and np.degrees(np.linalg.norm(cv2.Rodrigues(found.pose.R.T @ turn.R)[0])) < 0.2
    equal = two_views(t=(0, 0, 0), rotation_deg=(0, 0, 0), noise=0).verify(solver=solver)
    assert equal.status is Status.OK and not equal.pose.t.any()
    np.testing.assert_allclose(equal.pose.R, np.eye(3), atol=1e-6)


@each_solver
@pytest.mark.parametrize("motion", [{}, {"plane": True}, {"t": (0, 0, 0), "rotation_deg": (3, 10, -4)}])
def test_uncalibrated_pairs(solver, motion):
    view = two_views(300, outliers=0.3, **motion)
    found = view.verify(calibrated=False, solver=solver)
    assert (found.status, found.model) == (Status.OK, "homography" if motion else "fundamental")
    assert found.pose is None and found.best_pose is None and found.hypotheses == ()
    assert found.inliers[view.right].mean() > 0.7 and found.inliers[~view.right].mean() < 0.15
    one_camera = Verifier(GeometryConfig(solver=solver)).verify(view.p0, view.p1, CAMERA, None)
    assert one_camera.model == found.model and one_camera.pose is None


@each_solver
def test_hypotheses_hold_the_truth(solver):
    found = two_views(200).verify(solver=solver)
    assert len(found.hypotheses) == 1 and found.hypotheses[0] is found.pose
    plane = two_views(200, plane=True, noise=0.05)
    found = plane.verify(solver=solver)
    assert 1 <= len(found.hypotheses) <= 2
    assert min(max(plane.errors_deg(h)) for h in found.hypotheses) < 2


@pytest.mark.parametrize("off_plane", [0, 12])
def test_points_off_the_plane_choose_between_its_poses(off_plane):
    plane, rest = two_views(200, plane=True, noise=0.3, seed=3), two_views(off_plane or 1, noise=0.3, seed=4)
    outliers = two_views(30, outliers=1.0, seed=5)
    views = (plane, rest, outliers) if off_plane else (plane, outliers)
    p0, p1 = np.concatenate([v.p0 for v in views]), np.concatenate([v.p1 for v in views])
    poses = plane_poses(plane.p0, K, K, cv2.findHomography(plane.p0, plane.p1)[0])
    pose = resolved_pose(poses, p0[200:], p1[200:], K, K, 1.0)
    assert len(poses) == 2
    if off_plane:
        assert max(plane.errors_deg(pose)) < 2
    else:
        assert pose is None


# -- what is not verified ----------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 14])
def test_too_few(solver, calibrated, n):
    view = two_views(20)
    view.p0, view.p1 = view.p0[:n], view.p1[:n]
    found = view.verify(calibrated, solver=solver)
    assert found.status is (Status.TOO_FEW_INLIERS if n else Status.NO_MATCHES)
    assert found.inliers.shape == (n,) and found.pose is None


@each_solver
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_random_points_verify_nothing(solver, calibrated, seed):
    found = two_views(200, outliers=1.0, seed=seed).verify(calibrated, solver=solver)
    assert found.status is Status.TOO_FEW_INLIERS and found.pose is None


def test_the_inlier_ratio_counts_all_matches():
    view = two_views(400, outliers=0.7)
    assert view.verify(min_inlier_ratio=0.2).status is Status.OK
    assert view.verify(min_inlier_ratio=0.4).status is Status.TOO_FEW_INLIERS
    invalid = np.full((280, 2), np.nan)  # they count as matches, too
    view.p0, view.p1 = np.vstack([view.p0[view.right], invalid]), np.vstack([view.p1[view.right], invalid])
    found = view.verify(min_inlier_ratio=0.4)
    assert found.status is Status.TOO_FEW_INLIERS and not found.inliers[120:].any() and found.inliers[:120].sum() > 90


@each_solver
@pytest.mark.parametrize("camera", [CAMERA, None])
@pytest.mark.parametrize("places", [1, 2, 3, 4, 7])
def test_a_few_places_matched_many_times_verify_nothing(solver, camera, places):
    view = two_views(places if places > 4 else 5)
    p0, p1 = (np.repeat(p[:places], 40, axis=0) for p in (view.p0, view.p1))
    for q1 in (p0, p1, p0 + 5):
        found = verify(p0, q1, camera, solver=solver)
        assert found.status in (Status.TOO_FEW_INLIERS, Status.DEGENERATE) and found.pose is None


@each_solver
@pytest.mark.parametrize("camera", [CAMERA, None])
def test_one_place_matched_to_many_verifies_nothing(solver, camera):
    p0, p1 = np.tile([[100.0, 120.0]], (60, 1)), np.random.default_rng(0).uniform(0, 400, (60, 2))
    for a, b in ((p0, p1), (p1, p0)):
        found = verify(a, b, camera, solver=solver)
        assert found.status in (Status.TOO_FEW_INLIERS, Status.DEGENERATE) and found.pose is None


@each_solver
@pytest.mark.parametrize("camera", [CAMERA, None])
@pytest.mark.parametrize("change", [lambda p: p + 3, lambda p: p[:, ::-1], lambda p: p])
def test_points_on_a_line_determine_nothing(solver, camera, change):
    line = np.column_stack([np.linspace(10, 600, 80), np.linspace(20, 400, 80)])
    noise = np.random.default_rng(0).normal(0, 0.2, (2, 80, 2))
    found = verify(line + noise[0], change(line) + noise[1], camera, solver=solver)
    assert found.status in (Status.TOO_FEW_INLIERS, Status.DEGENERATE) and found.pose is None


def skew(t):
    return np.array([[0, -t[2], t[1]], [t[2], 0, -t[0]], [-t[1], t[0], 0]])


def two_poses(seed, n=120):
    """Points that obey two epipolar geometries: p1 is where the two epipolar lines of p0 meet."""
    rng = np.random.default_rng(seed)
    poses = [(np.eye(3), np.array([-1.0, 0, 0])), (rotation(rng.uniform(-8, 8, 3)), np.array([-0.6, 0.1, 0.8]))]
    p0 = rng.uniform((0, 0), (639, 479), (60_000, 2))
    rays0 = np.column_stack([p0, np.ones(len(p0))]) @ np.linalg.inv(K).T
    rays1 = np.cross(*(rays0 @ (skew(t) @ R).T for R, t in poses))
    rays1 /= rays1[:, 2:]
    p1 = (rays1 @ K.T)[:, :2]
    good = ((p1 > 0) & (p1 < (639, 479))).all(axis=1)
    for R, t in poses:  # in front of both cameras
        A = np.stack([rays0 @ R.T, -rays1], axis=-1)
        depth = np.linalg.solve(np.einsum("nij,nik->njk", A, A), np.einsum("nij,i->nj", A, -t)[..., None])[..., 0]
        good &= ((depth > 0.05) & (depth < 50)).all(axis=1)
    assert good.sum() > n
    p0, p1 = p0[good][:n], p1[good][:n]
    return p0 + rng.normal(0, 0.1, p0.shape), p1 + rng.normal(0, 0.1, p1.shape), [Pose(*p) for p in poses]


@each_solver
def test_where_two_poses_explain_the_data_it_is_degenerate(solver):
    flagged = 0
    for seed in range(8):
        p0, p1, poses = two_poses(seed)
        found = verify(p0, p1, solver=solver)
        if found.status is Status.DEGENERATE:
            flagged += 1
            assert found.pose is None and len(found.hypotheses) == 2
            assert min(max(pose_difference_deg(pose, found.hypotheses[0])) for pose in poses) < 5
        assert verify(p0, p1, solver=solver, check_degenerate=False).status is Status.OK
    assert flagged >= 6  # it draws four samples: 1 of 16 may miss the other


@each_solver
def test_good_data_are_not_called_degenerate(solver):
    for seed in range(8):
        assert two_views(80, outliers=0.3, seed=seed).verify(solver=solver).status is Status.OK


# -- points without an answer ------------------------------------------------------------------


@each_solver
def test_points_that_no_ray_reaches_are_left_out(solver):
    folding = Camera(640, 480, K, [-0.3, 0, 0, 0])  # its polynomial turns back 350 pixels from the centre
    view = two_views(200, camera0=folding, camera1=folding)
    outside = np.random.default_rng(0).uniform(0, 10, (50, 2))
    assert np.isnan(folding.undistort(outside)).all()
    expected = view.verify(solver=solver)
    order = np.random.default_rng(1).permutation(250)
    view.p0, view.p1 = np.vstack([view.p0, outside])[order], np.vstack([view.p1, outside])[order]
    found = view.verify(solver=solver)
    assert found.status is Status.OK and not found.inliers[order >= 200].any()
    assert abs(found.inliers.sum() - expected.inliers.sum()) <= 6 and max(view.errors_deg(found.pose)) < 2


@each_solver
@pytest.mark.parametrize("camera", [CAMERA, None])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_left_out(solver, camera, bad):
    view = two_views(200)
    view.p0[::4, 0] = bad
    found = verify(view.p0, view.p1, camera, solver=solver)
    assert found.status is Status.OK and not found.inliers[::4].any()
    assert verify(np.full((50, 2), bad), view.p1[:50], camera, solver=solver).status is Status.TOO_FEW_INLIERS


@each_solver
@pytest.mark.parametrize("camera", [CAMERA, None])
@pytest.mark.parametrize("size", [1e-9, 1e5, 1e12, 1e30])
def test_any_coordinates_give_a_status(solver, camera, size):
    rng = np.random.default_rng(0)
    p0, p1 = rng.uniform(-size, size, (2, 60, 2))
    for a, b in ((p0, p1), (p0, p0), (p0, -p0)):
        found = verify(a, b, camera, solver=solver)
        assert found.inliers.shape == (60,) and (found.pose is None or np.isfinite(found.pose.R).all())


@each_solver
@given(
    points=st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 100.5, 320.0, 639.0, 1e6, np.nan])] * 4), max_size=25),
    calibrated=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_repeated_and_lattice_points_give_a_status(solver, points, calibrated):
    p = np.array(points, float).reshape(-1, 4)
    found = verify(p[:, :2], p[:, 2:], CAMERA if calibrated else None, solver=solver, min_inliers=5)
    assert (found.status is Status.NO_MATCHES) == (len(p) == 0)
    assert not found.inliers[~np.isfinite(p).all(axis=1)].any()
    if found.status is Status.OK:
        assert found.inliers.sum() >= 5


# -- scale, seeds, solvers ---------------------------------------------------------------------


@each_solver
def test_the_threshold_is_in_pixels_of_the_searched_image(solver):
    view = two_views(300, noise=1.5)
    verifier = Verifier(GeometryConfig(solver=solver))
    counts = [verifier.verify(view.p0, view.p1, CAMERA, CAMERA, scale).inliers.sum() for scale in (1, 2, 4)]
    assert counts[0] < counts[1] < counts[2] and counts[2] > (150 if OLD_USAC else 250)


@each_solver
@pytest.mark.parametrize("calibrated", [True, False])
def test_the_same_seed_gives_the_same_result(solver, calibrated):
    view = two_views(200, outliers=0.6, noise=0.5)
    first = view.verify(calibrated, solver=solver, seed=3)
    cv2.setRNGSeed(12345)
    np.random.seed(1)
    again = view.verify(calibrated, solver=solver, seed=3)
    np.testing.assert_array_equal(first.inliers, again.inliers)
    assert first.status is again.status
    if calibrated:
        np.testing.assert_array_equal(first.pose.R, again.pose.R)
        np.testing.assert_array_equal(first.pose.t, again.pose.t)


def test_the_choice_of_the_solver(monkeypatch):
    assert make_solver(GeometryConfig(solver="opencv")).name == "opencv"
    assert make_solver(GeometryConfig(solver="auto")).name == SOLVERS[0]
    monkeypatch.setattr("vslam_features.solvers.find_spec", lambda name: None)
    assert isinstance(make_solver(GeometryConfig(solver="auto")), OpenCv)
    monkeypatch.setitem(__import__("sys").modules, "poselib", None)
    with pytest.raises(PluginError, match=r"pip install.*geometry\.solver.*opencv"):
        make_solver(GeometryConfig(solver="poselib"))


# -- formulas ----------------------------------------------------------------------------------


def test_fundamental_matrix_of_a_pose():
    view = two_views(50, noise=0)
    F = fundamental_of(Pose(view.R, view.t), CAMERA.K, CAMERA.K)
    h0, h1 = (np.column_stack([p, np.ones(50)]) for p in (view.p0, view.p1))
    np.testing.assert_allclose(np.einsum("ni,ij,nj->n", h1, F, h0), 0, atol=1e-9)
    np.testing.assert_allclose(sampson_error(F, view.p0, view.p1), 0, atol=1e-15)


def test_sampson_error_is_opencvs_and_the_books():
    rng = np.random.default_rng(0)
    F, p0, p1 = rng.normal(size=(3, 3)), rng.uniform(0, 500, (20, 2)), rng.uniform(0, 500, (20, 2))
    for value, a, b in zip(sampson_error(F, p0, p1), p0, p1):
        x0, x1 = np.array([*a, 1.0]), np.array([*b, 1.0])
        l1, l0 = F @ x0, F.T @ x1
        book = (x1 @ F @ x0) ** 2 / (l1[0] ** 2 + l1[1] ** 2 + l0[0] ** 2 + l0[1] ** 2)
        assert value == pytest.approx(book, rel=1e-9)
        assert value == pytest.approx(cv2.sampsonDistance(x0[:, None], x1[:, None], F), rel=1e-6)
    assert np.isfinite(sampson_error(np.zeros((3, 3)), p0, p1)).all()


def test_homography_error_is_the_distance_to_the_nearest_pair_that_fits():
    rng = np.random.default_rng(0)
    H = np.array([[1.02, 0.03, 5], [-0.02, 0.98, -3], [1e-5, -2e-5, 1]])
    p0 = rng.uniform(50, 400, (20, 2))
    exact = cv2.perspectiveTransform(p0[None], H)[0]
    np.testing.assert_allclose(homography_error(H, p0, exact), 0, atol=1e-18)
    p1 = exact + rng.normal(0, 0.3, p0.shape)
    for value, a, b in zip(homography_error(H, p0, p1), p0, p1):
        # Gauss-Newton over the corrected point in image 0
        x = (a + cv2.perspectiveTransform(b[None, None], np.linalg.inv(H))[0, 0]) / 2
        y = cv2.perspectiveTransform(x[None, None], H)[0, 0]
        assert value == pytest.approx(((x - a) ** 2).sum() + ((y - b) ** 2).sum(), rel=0.05)


def test_homography_error_of_a_singular_matrix_is_infinite():
    p = np.random.default_rng(0).uniform(0, 100, (5, 2))
    for H in (np.zeros((3, 3)), np.outer([1.0, 2, 3], [1.0, 0, 1])):
        error = homography_error(H, p, p)
        assert error.shape == (5,) and (error > 1e3).all() and not np.isnan(error).any()


def test_gric_is_torrs_formula():
    e2 = np.array([0.0, 0.5, 3.0, 100.0])
    sigma2, n, r = 0.25, 4, 4
    for d, k in ((2, 8), (3, 7), (3, 5)):
        rho = sum(min(e / sigma2, 2 * (r - d)) for e in e2)
        assert gric(e2, sigma2, d, k) == pytest.approx(rho + np.log(4) * d * n + np.log(4 * n) * k)
    assert np.isfinite(gric(np.empty(0), 1.0, 3, 7)) and np.isfinite(gric(np.full(3, np.inf), 1.0, 3, 7))


@given(st.floats(0, 180), st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda v: np.linalg.norm(v) > 0.1))
@settings(deadline=None)
def test_pose_difference(angle, axis):
    R = rotation(np.array(axis) / np.linalg.norm(axis) * angle)
    t = np.array([1.0, 0, 0])
    turned, direction = pose_difference_deg(Pose(np.eye(3), t), Pose(R, 3 * (rotation((0, 0, angle)) @ t)))
    assert turned == pytest.approx(angle, abs=1e-4) and direction == pytest.approx(angle, abs=1e-4)
    assert np.isnan(pose_difference_deg(Pose(R, t), Pose(R, np.zeros(3)))[1])
