"""camera.py against formulas written out here, OpenCV and hand-computed numbers."""

import copy
import pickle

import cv2
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from vslam_features.camera import Camera
from vslam_features.errors import CameraError, DataError

K = np.array([[400.0, 0, 319.5], [0, 410, 239.5], [0, 0, 1]])
DISTORTIONS = {
    "none": ("plumb_bob", []),
    "plumb_bob4": ("plumb_bob", [-0.28, 0.07, 2e-4, 2e-5]),
    "plumb_bob5": ("plumb_bob", [-0.3, 0.1, 1e-3, -2e-3, 0.01]),
    "rational8": ("rational_polynomial", [8.0, 5.0, 1e-4, -1e-4, 0.3, 8.3, 7.5, 1.5]),
    "rational12": ("rational_polynomial", [0.1, 0.05, 1e-4, -1e-4, 0.03, 0.3, 0.05, 0.01, 1e-3, 2e-3, 1e-3, 3e-4]),
    "rational14": ("rational_polynomial", [0.1, 0.05, 0, 0, 0.03, 0.3, 0.05, 0.01, 0, 0, 0, 0, 0.01, 0.02]),
    "equidistant": ("equidistant", [-0.01, 0.02, -0.01, 0.002]),
}
pinhole = pytest.mark.parametrize("name", [n for n in DISTORTIONS if n != "equidistant"])
every = pytest.mark.parametrize("name", list(DISTORTIONS))


def camera(name: str = "none", size=(640, 480)) -> Camera:
    model, D = DISTORTIONS[name]
    return Camera(*size, K, D, model)


def grid(step: int = 16) -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(0, 640.0, step), np.arange(0, 480.0, step)), -1).reshape(-1, 2)


def info(**changes) -> dict:
    values = dict(
        width=640, height=480, K=K.ravel(), D=[-0.28, 0.07, 2e-4, 2e-5, 0],
        P=[300, 0, 310, -30, 0, 301, 230, 0, 0, 0, 1, 0], distortion_model="plumb_bob", binning_x=0, binning_y=0,
        roi=(0, 0, 0, 0), image_size=(640, 480), rectified=False,
    )  # fmt: skip
    return {**values, **changes}


# -- projection --------------------------------------------------------------------------------


def test_plumb_bob_formula_of_the_documentation():
    k1, k2, p1, p2, k3 = DISTORTIONS["plumb_bob5"][1]
    x, y = 0.3, -0.2
    r2 = x * x + y * y
    radial = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3
    xd = x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x)
    yd = y * radial + p1 * (r2 + 2 * y * y) + 2 * p2 * x * y
    expected = [[400 * xd + 319.5, 410 * yd + 239.5]]
    np.testing.assert_allclose(camera("plumb_bob5").project([[0.6, -0.4, 2.0]]), expected, rtol=1e-12)


def test_equidistant_formula_of_the_documentation():
    k1, k2, k3, k4 = DISTORTIONS["equidistant"][1]
    theta = np.arctan(np.hypot(0.3, 0.4))
    scale = theta * (1 + k1 * theta**2 + k2 * theta**4 + k3 * theta**6 + k4 * theta**8) / 0.5
    expected = [[400 * 0.3 * scale + 319.5, 410 * 0.4 * scale + 239.5]]
    np.testing.assert_allclose(camera("equidistant").project([[0.3, 0.4, 1.0]]), expected, rtol=1e-12)


@every
def test_project_agrees_with_opencv(name):
    points = np.random.default_rng(0).uniform([-1, -0.8, 1.5], [1, 0.8, 4], (50, 3))
    zero, D = np.zeros(3), np.array(DISTORTIONS[name][1])
    project = cv2.fisheye.projectPoints if name == "equidistant" else cv2.projectPoints
    if name == "equidistant":
        expected = project(points.reshape(-1, 1, 3), zero, zero, K, D)[0]
    else:
        expected = project(points.reshape(-1, 1, 3), zero, zero, K, D if D.size else None)[0]
    np.testing.assert_allclose(camera(name).project(points), expected.reshape(-1, 2), atol=1e-9)


@every
def test_undistort_agrees_with_opencv(name):
    points, D = grid(), np.array(DISTORTIONS[name][1])
    if name == "equidistant":
        expected = cv2.fisheye.undistortPoints(points.reshape(-1, 1, 2), K, D, P=K)
    else:
        undistort = getattr(cv2, "undistortPointsIter", None)
        criteria = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 200, 1e-13)
        if undistort:  # OpenCV 4
            expected = undistort(points.reshape(-1, 1, 2), K, D if D.size else None, np.eye(3), K, criteria)
        else:
            expected = cv2.undistortPoints(points.reshape(-1, 1, 2), K, D, P=K, criteria=criteria)
    np.testing.assert_allclose(camera(name).undistort(points), expected.reshape(-1, 2), atol=1e-6)


@every
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_undistort_inverts_project(name, data):
    cam = camera(name)
    x, y = data.draw(st.floats(0, 639)), data.draw(st.floats(0, 479))
    ideal = cam.undistort([[x, y]])
    ray = np.column_stack([(ideal - K[:2, 2]) / K[[0, 1], [0, 1]], [1.0]])
    np.testing.assert_allclose(cam.project(ray), [[x, y]], atol=1e-6)
    bearing = cam.bearings([[x, y]])
    np.testing.assert_allclose(bearing, ray / np.linalg.norm(ray), atol=1e-9)


@settings(max_examples=300, deadline=None)
@example(coefficients=[0, 0, 0, 0, 5e-324], x=0.1, y=0.1)
@example(coefficients=[1e6, -1e6, 0, 0, 1e6], x=0.1, y=0.1)
@given(
    coefficients=st.lists(st.floats(-1, 1), min_size=5, max_size=5),
    x=st.floats(-1, 1),
    y=st.floats(-1, 1),
)
def test_any_coefficients_give_the_ray_back_or_nan(coefficients, x, y):
    k1, k2, p1, p2, k3 = coefficients
    cam = Camera(640, 480, K, [k1, k2, p1 / 100, p2 / 100, k3])
    pixel = cam.project([[x, y, 1.0]])
    ray = cam.bearings(pixel)
    assume(np.isfinite(ray).all())
    np.testing.assert_allclose(cam.project(ray), pixel, atol=1e-3)


def test_equidistant_sees_beyond_90_degrees_but_has_no_ideal_pixel_there():
    cam = Camera(640, 480, K, np.zeros(4), "equidistant")
    angle = np.radians([0, 89, 91, 120])
    rays = np.column_stack([np.sin(angle), 0 * angle, np.cos(angle)])
    pixels = cam.project(rays)
    np.testing.assert_allclose(pixels, np.column_stack([400 * angle + 319.5, np.full(4, 239.5)]))
    np.testing.assert_allclose(cam.bearings(pixels), rays, atol=1e-12)
    assert np.isfinite(cam.undistort(pixels)).all(axis=1).tolist() == [True, True, False, False]


@every
def test_nothing_behind_the_camera_and_nan_stays_nan(name):
    points = [[0, 0, -1], [0, 0, 0], [np.nan, 0, 1], [0, np.inf, 1], [0, 0, 2.0]]
    assert np.isfinite(camera(name).project(points)).all(axis=1).tolist() == [False] * 4 + [True]
    pixels = [[np.nan, 1], [np.inf, 2], [319.5, 239.5]]
    np.testing.assert_allclose(camera(name).undistort(pixels)[2], [319.5, 239.5], atol=1e-9)
    assert np.isnan(camera(name).undistort(pixels)[:2]).all()
    assert np.isnan(camera(name).bearings(pixels)[:2]).all()


def test_no_pixel_where_the_polynomial_folds_back():
    cam = Camera(640, 480, K, [-1 / 3, 0, 0, 0])  # r (1 - r^2 / 3) peaks at r = 1 with 2 / 3
    inside, folded = cam.project([[0.99, 0, 1], [1.01, 0, 1]])
    assert np.isfinite(inside).all() and np.isnan(folded).all()
    reachable, unreachable = cam.undistort([[319.5 + 400 * 0.66, 239.5], [319.5 + 400 * 0.67, 239.5]])
    assert np.isfinite(reachable).all() and np.isnan(unreachable).all()


@every
def test_empty_input_and_wrong_shapes(name):
    cam = camera(name)
    assert cam.undistort(np.empty((0, 2))).shape == (0, 2) and cam.undistort([]).dtype == np.float64
    assert cam.project([]).shape == (0, 2) and cam.bearings([]).shape == (0, 3)
    for call, bad in (
        (cam.undistort, np.zeros((3, 3))),
        (cam.project, np.zeros(3)),
        (cam.bearings, np.zeros((2, 2, 2))),
    ):
        with pytest.raises(DataError, match="expected points"):
            call(bad)


# -- scaling, cropping, binning ----------------------------------------------------------------


def test_half_pixel_numbers_by_hand():
    half = camera().scaled_to((320, 240))
    assert half.size == (320, 240)
    np.testing.assert_allclose(half.K, [[200, 0, 159.5], [0, 205, 119.5], [0, 0, 1]])
    np.testing.assert_allclose(camera().binned(2, 4).K, [[200, 0, 159.5], [0, 102.5, 59.5], [0, 0, 1]])
    np.testing.assert_allclose(camera().cropped(100, 50, 200, 100).K, [[400, 0, 219.5], [0, 410, 189.5], [0, 0, 1]])
    assert camera().binned(3, 3).size == (213, 160)
    assert camera().mean_focal == 405


@every
@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), x=st.floats(-0.5, 0.5), y=st.floats(-0.4, 0.4))
def test_scaling_commutes_with_projection(name, width, height, x, y):
    pixel = camera(name).project([[x, y, 1]])
    expected = (pixel + 0.5) * [width / 640, height / 480] - 0.5
    np.testing.assert_allclose(camera(name).scaled_to((width, height)).project([[x, y, 1]]), expected, atol=1e-8)


@every
@settings(max_examples=30, deadline=None)
@given(
    window=st.tuples(st.integers(0, 300), st.integers(0, 200), st.integers(20, 300), st.integers(20, 200)),
    binning=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_cropping_and_binning_commute_with_projection(name, window, binning):
    ray = [[0.2, -0.1, 1]]
    cam = camera(name).cropped(*window).binned(*binning)
    expected = (camera(name).project(ray) - window[:2] + 0.5) / binning - 0.5
    np.testing.assert_allclose(cam.project(ray), expected, atol=1e-9)
    assert cam.size == (window[2] // binning[0], window[3] // binning[1])


def test_binning_equals_averaging_pixels():
    ramp = np.arange(640.0)[None].repeat(2, 0)
    merged = ramp.reshape(1, 2, 160, 4).mean((1, 3))[0]  # pixel i shows the input's x = merged[i]
    for i in (0, 7, 159):
        ray = [[(merged[i] - K[0, 2]) / K[0, 0], 0, 1]]
        assert camera().binned(4, 2).project(ray)[0, 0] == pytest.approx(i)


def test_a_window_outside_the_image_is_refused():
    for window in ((600, 0, 41, 10), (-1, 0, 10, 10), (0, 0, 0, 10)):
        with pytest.raises(CameraError):
            camera().cropped(*window)
    with pytest.raises(CameraError, match="binning"):
        camera().binned(641, 1)
    with pytest.raises(CameraError, match="positive"):
        camera().scaled_to((0, 10))


# -- camera_info -------------------------------------------------------------------------------


def test_raw_uses_K_and_D_and_rectified_uses_P():
    raw, rectified = Camera.from_info(**info()), Camera.from_info(**info(rectified=True))
    assert raw == Camera(640, 480, K, [-0.28, 0.07, 2e-4, 2e-5, 0])
    assert rectified == Camera(640, 480, [[300, 0, 310], [0, 301, 230], [0, 0, 1]], rectified=True)
    assert rectified.D.size == 0


@pytest.mark.parametrize("rectified", [False, True])
def test_roi_comes_before_binning(rectified):
    roi = (101, 51, 300, 200)
    cam = Camera.from_info(**info(roi=roi, binning_x=2, binning_y=4, image_size=(150, 50), rectified=rectified))
    f, c = ((300, 301), (310, 230)) if rectified else ((400, 410), (319.5, 239.5))
    expected = [f[0] / 2, f[1] / 4, (c[0] - 101 + 0.5) / 2 - 0.5, (c[1] - 51 + 0.5) / 4 - 0.5]
    np.testing.assert_allclose(cam.K[[0, 1, 0, 1], [0, 1, 2, 2]], expected)
    assert cam.size == (150, 50)


def test_uncalibrated_is_none():
    assert Camera.from_info(**info(K=np.zeros(9), D=[], P=np.zeros(12), distortion_model="")) is None


def test_empty_model_without_coefficients_means_no_distortion():
    assert Camera.from_info(**info(distortion_model="", D=[])) == Camera(640, 480, K)
    assert Camera.from_info(**info(distortion_model="", D=[0.0] * 5)) == Camera(640, 480, K)
    with pytest.raises(CameraError, match="unknown distortion model ''; valid: plumb_bob"):
        Camera.from_info(**info(distortion_model=""))


def test_another_image_size_names_got_expected_and_next_step():
    with pytest.raises(CameraError, match=r"images of 640x480, got an image of 320x240; .*scale"):
        Camera.from_info(**info(image_size=(320, 240)))
    with pytest.raises(CameraError, match="leaves the image"):
        Camera.from_info(**info(roi=(600, 0, 100, 100)))
    with pytest.raises(CameraError, match="P is zero"):
        Camera.from_info(**info(P=np.zeros(12), rectified=True))
    with pytest.raises(CameraError, match="size must be positive, got 0x0"):
        Camera.from_info(**info(width=0, height=0))


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(width=0), "size must be positive"),
        (dict(height=-3), "size must be positive"),
        (dict(width=640.0), "must be an integer"),
        (dict(K=np.full((3, 3), np.nan)), "K is not finite"),
        (dict(K=np.eye(2)), "shape"),
        (dict(K=np.diag([0, 400, 1])), "focal lengths"),
        (dict(K=np.diag([400, -400, 1])), "focal lengths"),
        (dict(K=[[400, 3, 320], [0, 400, 240], [0, 0, 1]]), "K must be"),
        (dict(K=[[400, 0, 320], [0, 400, 240], [0, 0, 2]]), "K must be"),
        (dict(D=[np.inf] * 4), "D is not finite"),
        (dict(D=[1e200] * 4), "below 1e6"),
        (dict(D=[0.1] * 3), "plumb_bob takes 0 or 4 or 5 distortion coefficients, got 3"),
        (dict(D=[0.1] * 5, model="rational_polynomial"), "takes 8 or 12 or 14"),
        (dict(D=[], model="equidistant"), "takes 4"),
        (dict(model="fisheye"), "unknown distortion model 'fisheye'; valid: .*equidistant"),
        (dict(D=[0.1] * 4, rectified=True), "rectified image has no distortion"),
    ],
)
def test_impossible_cameras_are_refused(changes, message):
    with pytest.raises(CameraError, match=message):
        Camera(**{**dict(width=640, height=480, K=K), **changes})


def test_cameras_compare_by_value_and_cannot_be_changed():
    a, b = camera("plumb_bob5"), camera("plumb_bob5")
    a.undistort(grid())
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != camera("plumb_bob4") and a != camera("plumb_bob5", (640, 481)) and a != "camera"
    assert pickle.loads(pickle.dumps(a)) == copy.deepcopy(a) == b
    with pytest.raises(ValueError):
        a.K[0, 0] = 1
    source = K.copy()
    cam = Camera(640, 480, source)
    source[0, 0] = 1
    assert cam.K[0, 0] == 400
