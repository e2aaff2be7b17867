"""The FlexGlue-shaped network in torch: parts against formulas, the stop rule, symmetry, and weights that match."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skimage")

import skimage.data  # noqa: E402
from flexglue_helpers import (  # noqa: E402
    DECAYS,
    EVERY,
    PAIRS,
    SEED,
    THRESHOLDS,
    by_torch,
    exchanged,
    feed,
    keypoints_of,
    matched,
    moved,
    pairs,
    pictures,
)
from safetensors.torch import save_file  # noqa: E402

from vslam_features.errors import ConfigError, DataError, WeightsError  # noqa: E402
from vslam_features.networks.flexglue import FLEXGLUE, FLEXGLUE_TINY, FlexGlue, in_image  # noqa: E402
from vslam_features.networks.flexglue_encoder import Block  # noqa: E402
from vslam_features.networks.flexglue_layers import _turned, rotation  # noqa: E402
from vslam_features.networks.flexglue_readout import _expected, sampled  # noqa: E402
from vslam_features.networks.flexglue_weights import constructed, load, randomised  # noqa: E402


@pytest.fixture(scope="module")
def random():
    return randomised(FLEXGLUE_TINY, SEED)


@pytest.fixture(scope="module")
def matching():
    """With weights that match."""
    return constructed(FLEXGLUE_TINY, 0)


@pytest.fixture(scope="module")
def inputs(random):
    return pairs(random)


# -- parts -------------------------------------------------------------------------------------------


def test_sizes_of_the_release():
    """shared/facts.md: 512 x 512 pixels, a grid of 64 x 64 with 256 channels, 9 layers."""
    assert (FLEXGLUE.image_size, FLEXGLUE.grid, FLEXGLUE.dim, FLEXGLUE.layers) == ((512, 512), (64, 64), 256, 9)
    assert FLEXGLUE_TINY.layers == FLEXGLUE.layers and FLEXGLUE_TINY.grid == (20, 24)


def test_the_expected_cell_is_the_weighted_mean():
    mass = np.random.default_rng(0).uniform(size=(50, 64))
    cells, whole = _expected(torch.from_numpy(mass))
    np.testing.assert_allclose(cells, (mass * np.arange(64)).sum(axis=1) / mass.sum(axis=1), atol=1e-9)
    np.testing.assert_allclose(whole, mass.sum(axis=1), atol=1e-9)
    cells, whole = _expected(torch.zeros(3, 64))  # what a broken CumSum gives: far away, and no NaN
    assert (cells == 63).all() and (whole == 0).all()


def test_tokens_are_interpolated_between_the_centres_of_cells():
    """A map whose channels are the pixel at the centre of each cell gives at each keypoint its own pixel."""
    rows, columns = 20, 24
    y, x = np.meshgrid(np.arange(rows) * 8 + 3.5, np.arange(columns) * 8 + 3.5, indexing="ij")
    pixels = torch.from_numpy(np.stack((x, y))[None]).float()
    points = np.random.default_rng(0).uniform([3.5, 3.5], [187.5, 155.5], (100, 2)).astype(np.float32)
    found = sampled(pixels, in_image(torch.from_numpy(points), torch.tensor([192.0, 160.0])))
    np.testing.assert_allclose(found, points, atol=1e-3)
    corner = sampled(pixels, in_image(torch.zeros(1, 2), torch.tensor([192.0, 160.0])))
    np.testing.assert_allclose(corner, [[3.5, 3.5]], atol=1e-4)  # beyond the last centre: continued


def test_rotary_positions_make_products_depend_on_the_offset_only():
    rows, columns, width = 6, 7, 16
    cos, sin = rotation(rows, columns, width)
    q, k = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    turned = [_turned(v.expand(rows * columns, width), cos, sin).reshape(rows, columns, width) for v in (q, k)]
    at = lambda y, x, dy, dx: float(turned[0][y, x] @ turned[1][y + dy, x + dx])  # noqa: E731
    assert at(0, 0, 2, 3) == pytest.approx(at(3, 2, 2, 3), abs=1e-4)
    assert at(0, 0, 2, 3) != pytest.approx(at(0, 0, 3, 2), abs=1e-2)
    np.testing.assert_allclose(turned[0].norm(dim=-1), q.norm().expand(rows, columns), atol=1e-5)


def test_a_block_sees_three_pixels_around():
    """Depthwise 7 x 7 (ConvNeXt): what changes one token changes those within three cells of it."""
    block = Block(8).eval()
    x = torch.randn(1, 8, 15, 15, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, :, 7, 7] += 1
    changed = (block(x) - block(other)).abs().sum(dim=1)[0] > 1e-7
    expected = torch.zeros(15, 15, dtype=bool)
    expected[4:11, 4:11] = True
    assert (changed == expected).all()


def test_the_map_has_a_token_every_8_pixels_and_wrong_sizes_are_named(random):
    image = torch.randn(1, 3, 160, 192, generator=torch.Generator().manual_seed(0))
    maps = random.describe(image)
    assert maps.shape == (64, 20, 24) and maps.dtype == torch.float32
    with pytest.raises(DataError, match=r"image has shape \(1, 3, 192, 160\), flexglue-tiny takes \(1, 3, 160, 192\)"):
        random.describe(image.transpose(2, 3))
    points, size = torch.zeros(2, 2), torch.ones(2)
    with pytest.raises(DataError, match="descriptors1 has shape"):
        random.match(points, points, maps, maps[:, :-1], size, size)
    with pytest.raises(ConfigError, match="expected some of 1 to 8"):
        random.match(points, points, maps, maps, size, size, layers=(2, 9))


# -- the stop rule -------------------------------------------------------------------------------------


def stopped_layer(scores, threshold, decay, layers, count=9) -> int:
    """The rule of the published description, in float64; 0: none."""
    limits = {k: threshold * (1 - decay) ** (count - k) for k in layers}
    return next((k for k in layers if scores[k - 1] < limits[k]), 0)


@pytest.mark.parametrize("layers", [EVERY, (2, 4, 6, 8), (5,)])
def test_it_stops_where_the_formula_says(layers, random, inputs):
    stops = set()
    for pair in inputs if layers == EVERY else inputs[:1]:
        scores = by_torch(random, pair).layer_scores
        for threshold in THRESHOLDS:
            for decay in DECAYS:
                scalars = {"min_covisibility": np.float32(threshold), "early_stop_decay": np.float32(decay)}
                found = by_torch(random, pair | scalars, layers)
                expected = stopped_layer(scores, threshold, decay, layers)
                assert found.stopped_after_layer == expected
                last = expected or 9
                assert found.layer_scores == scores[:last] and found.covisibility_score == scores[last - 1]
                if expected or scores[-1] < threshold:
                    assert (found.matches0 == -1).all() and (found.mscores0 == 0).all()
                stops.add(expected)
    assert stops == {0, *EVERY} if layers == EVERY else len(stops) >= 2  # or the test says nothing


def test_layers_after_a_stop_are_not_run(random, inputs):
    ran = []
    hooks = [
        layer.register_forward_hook(lambda *_, k=k: ran.append(k)) for k, layer in enumerate(random.matcher.layers)
    ]
    hooks.append(random.matcher.readout.register_forward_hook(lambda *_: ran.append("readout")))
    one = {"min_covisibility": np.float32(1.0), "early_stop_decay": np.float32(0.0)}
    try:
        assert by_torch(random, inputs[0] | one, (3, 5)).stopped_after_layer == 3
        assert ran == [0, 1, 2]
        by_torch(random, inputs[0])
        assert ran[3:] == [*range(9), "readout"]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("layer", [2, 3, 9])
def test_nan_ends_the_run_as_nan(layer, inputs):
    network = randomised(FLEXGLUE_TINY, SEED)
    network.matcher.heads[layer - 1].pooled.bias.data[:] = float("nan")
    scalars = {"min_covisibility": np.float32(0.0), "early_stop_decay": np.float32(0.5)}
    found = by_torch(network, inputs[0] | scalars, (2, 4, 6, 8))
    # Where the layer is not checked nobody reads its score; the last one is the covisibility.
    assert np.isnan(found.covisibility_score) == (layer != 3)
    assert found.stopped_after_layer == (2 if layer == 2 else 0)
    assert (len(found.layer_scores), bool((found.matches0 == -1).all())) == ((2, True) if layer == 2 else (9, False))


# -- the pair ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["random", "matching"])
def test_exchanging_the_images_exchanges_the_matches(weights, request):
    network, found = request.getfixturevalue(weights), pictures()
    for seed, (a, b) in enumerate(PAIRS[:3]):
        pair = feed(network, (found[a], found[b]), counts=(200, 150), seed=seed)
        one, other = by_torch(network, pair), by_torch(network, exchanged(pair))
        there, back = matched(one.matches0), matched(other.matches0)
        assert there and there == {(i, j) for j, i in back}
        np.testing.assert_allclose(one.layer_scores, other.layer_scores, atol=1e-5)
        for i, j in there:
            assert one.mscores0[i] == pytest.approx(float(other.mscores0[j]), abs=1e-4)


def test_a_size_of_the_image_is_nothing_but_a_scale(matching):
    """The same maps as of an image of another size: keypoints at the same places match the same."""
    views, forward = moved(skimage.data.astronaut())
    points, _ = keypoints_of(views, forward)
    pair = feed(matching, views, points)
    size = pair["image_size1"]
    other = np.array([544, 640], np.float32)
    scaled = {"keypoints1": (pair["keypoints1"] + 0.5) * (other / size) - 0.5, "image_size1": other}
    assert matched(by_torch(matching, pair).matches0) == matched(by_torch(matching, pair | scaled).matches0)


@pytest.mark.parametrize("name", ["astronaut", "coffee", "chelsea"])
def test_constructed_weights_match_what_overlaps(name, matching):
    views, forward = moved(getattr(skimage.data, name)())
    points, truth = keypoints_of(views, forward)
    found = by_torch(matching, feed(matching, views, points))
    sure = found.mscores0 > 0.1
    right = (found.matches0.numpy() == truth) & sure.numpy()
    assert sure.sum() >= 100 and right.sum() >= 0.6 * sure.sum()
    assert found.covisibility_score > 0.8


def test_constructed_weights_tell_places_apart(matching):
    found = pictures()
    score = lambda a, b: by_torch(matching, feed(matching, (found[a], found[b]))).covisibility_score  # noqa: E731
    same = [score(f"{name}_0", f"{name}_1") for name in ("cup", "cat", "gravel", "stars-dim")]
    other = [score(f"{a}_0", f"{b}_1") for a, b in (("cup", "cat"), ("cat", "stars-dim"), ("gravel", "cup"))]
    assert min(same) > 0.9 and max(other) < 0.3


# -- weights -------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for make in (randomised, constructed):
        one, two, other = (make(FLEXGLUE_TINY, seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert any(not torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.rand(3), expected)


def test_constructed_weights_of_other_sizes():
    config = replace(FLEXGLUE_TINY, name="other", dim=96, heads=4, layers=3, image_size=(160, 160))
    network = constructed(config, 0)
    image = torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    maps, size = network.describe(image), torch.tensor([160.0, 160.0])
    points = torch.from_numpy(np.random.default_rng(0).uniform(0, 159, (50, 2)).astype(np.float32))
    found = network.match(points, points, maps, maps, size, size, layers=())
    assert (found.matches0 == torch.arange(50)).float().mean() > 0.7 and len(found.layer_scores) == 3


def test_a_state_dict_is_loaded_and_one_of_another_network_is_named(random, tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file(random.state_dict(), path)
    loaded = load(FLEXGLUE_TINY, path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in random.state_dict().items())
    with pytest.raises(WeightsError, match="not the weights of flexglue .*FlexGlue release do not fit"):
        load(FLEXGLUE, path)
    state = dict(random.state_dict())
    state["matcher.heads.3.pooled.bias"] = torch.tensor([float("nan")])
    save_file(state, path)
    with pytest.raises(WeightsError, match=r"matcher\.heads\.3\.pooled\.bias has NaN"):
        load(FLEXGLUE_TINY, path)


def test_positions_are_no_weights():
    assert not [name for name in FlexGlue(FLEXGLUE_TINY).state_dict() if name.endswith(("cos", "sin"))]
