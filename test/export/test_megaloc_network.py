"""MegaLoc in torch against other implementations: DINOv2 of transformers, OpenCV's bicubic, SALAD in float64 NumPy."""

import contextlib
import dataclasses
import sys

import cv2
import numpy as np
import pytest
from scipy.special import logsumexp

torch = pytest.importorskip("torch")

from vslam_features.errors import DataError  # noqa: E402
from vslam_features.networks.megaloc import MEGALOC, MEGALOC_TINY, MegaLoc, MegaLocConfig, randomised  # noqa: E402
from vslam_features.networks.salad import sinkhorn, transport  # noqa: E402

# The grid of positions has the size of the image: nothing is interpolated, which every implementation does otherwise.
NATIVE = dataclasses.replace(MEGALOC_TINY, image_size=(70, 70), depth=3, pos_grid=5)
BOTH = [MEGALOC_TINY, pytest.param(MEGALOC, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


def expected_state(c: MegaLocConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the order of the released file, written down from the architecture."""
    state = {"cls_token": (1, 1, c.dim), "pos_embed": (1, c.pos_grid**2 + 1, c.dim)}
    state |= {"patch_embed.proj.weight": (c.dim, 3, c.patch, c.patch), "patch_embed.proj.bias": (c.dim,)}
    inside = c.mlp_ratio * c.dim
    for i in range(c.depth):
        block = {"norm1.weight": (c.dim,), "norm1.bias": (c.dim,)}
        block |= {"attn.qkv.weight": (3 * c.dim, c.dim), "attn.qkv.bias": (3 * c.dim,)}
        block |= {"attn.proj.weight": (c.dim, c.dim), "attn.proj.bias": (c.dim,), "ls1.gamma": (c.dim,)}
        block |= {"norm2.weight": (c.dim,), "norm2.bias": (c.dim,)}
        block |= {"mlp.fc1.weight": (inside, c.dim), "mlp.fc1.bias": (inside,)}
        block |= {"mlp.fc2.weight": (c.dim, inside), "mlp.fc2.bias": (c.dim,), "ls2.gamma": (c.dim,)}
        state |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    state |= {"norm.weight": (c.dim,), "norm.bias": (c.dim,)}
    state = {f"backbone.{name}": shape for name, shape in state.items()}
    state["aggregator.agg.dust_bin"] = ()
    layers = [("token_features.0", c.dim, c.hidden, ()), ("token_features.2", c.hidden, c.token_dim, ())]
    for name, outputs in (("cluster_features", c.cluster_dim), ("score", c.clusters)):
        layers += [(f"{name}.0", c.dim, c.hidden, (1, 1)), (f"{name}.3", c.hidden, outputs, (1, 1))]
    for name, inputs, outputs, kernel in layers:
        state[f"aggregator.agg.{name}.weight"] = (outputs, inputs, *kernel)
        state[f"aggregator.agg.{name}.bias"] = (outputs,)
    together = c.token_dim + c.clusters * c.cluster_dim
    return state | {"aggregator.linear.weight": (c.out_dim, together), "aggregator.linear.bias": (c.out_dim,)}


def images(count: int, config: MegaLocConfig = MEGALOC_TINY, seed: int = 0) -> torch.Tensor:
    width, height = config.image_size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def run(module, *args):
    with torch.no_grad():
        return module(*args)


@pytest.mark.parametrize("config, parameters", [(MEGALOC, 228_639_553), (MEGALOC_TINY, 242_633)])
def test_the_state_dict_has_the_published_names_shapes_and_order(config, parameters):
    with torch.device("meta"):
        state = MegaLoc(config).state_dict()
    assert [(name, tuple(v.shape)) for name, v in state.items()] == list(expected_state(config).items())
    assert all(v.dtype == torch.float32 for v in state.values())
    assert sum(v.numel() for v in state.values()) == parameters
    assert len(state) == 21 + 14 * config.depth


# Ours to those of transformers 5, first to last.
RENAMED = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "blocks.": "encoder.layer.",
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}


@contextlib.contextmanager
def no_standin():
    """Without the stand-in of torchvision that tests of ALIKED leave behind, and that transformers would look into."""
    standin = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torchvision"}
    try:
        yield
    finally:
        sys.modules.update(standin)


@no_standin()
def of_transformers(config: MegaLocConfig, backbone: torch.nn.Module) -> torch.nn.Module:
    """DINOv2 of transformers with the same weights."""
    transformers = pytest.importorskip("transformers")
    sizes = transformers.Dinov2Config(
        hidden_size=config.dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        image_size=config.patch * config.pos_grid,
        patch_size=config.patch,
        attn_implementation="eager",
    )
    state = {"embeddings.mask_token": torch.zeros(1, config.dim)}  # for training
    for name, value in backbone.state_dict().items():
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        if name.startswith("norm."):
            name = "layer" + name
        if "attn.qkv" in name:
            for letter, part in zip("qkv", value.chunk(3)):
                state[name.replace("attn.qkv", f"attention.{letter}_proj")] = part
        else:
            state[name] = value
    model = transformers.Dinov2Model(sizes)
    model.load_state_dict(state, strict=True)
    return model.eval()


def assert_tokens_equal(config: MegaLocConfig, image: torch.Tensor):
    backbone = randomised(config, 3).backbone
    tokens = run(of_transformers(config, backbone), image).last_hidden_state
    patches, token = run(backbone, image)
    scale = tokens.abs().max()
    assert scale > 1
    torch.testing.assert_close(token, tokens[:, 0], atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(patches.flatten(2).transpose(1, 2), tokens[:, 1:], atol=1e-5 * scale, rtol=0)


def test_the_backbone_equals_transformers():
    assert_tokens_equal(NATIVE, images(2, NATIVE))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_released_backbone_equals_transformers():
    assert_tokens_equal(MEGALOC, torch.randn(1, 3, 518, 518, generator=torch.Generator().manual_seed(0)))


def test_the_map_of_patches_lies_as_the_image_does():
    patches, _ = run(randomised(MEGALOC_TINY, 0).backbone, images(1))
    assert patches.shape == (1, 64, 4, 5)
    backbone = randomised(dataclasses.replace(MEGALOC_TINY, depth=0), 0).backbone
    image = images(1)
    changed = image.clone()
    changed[:, :, 2 * 14 : 3 * 14, 4 * 14 :] += 1
    different = (run(backbone, image)[0] != run(backbone, changed)[0]).any(dim=1)[0]
    assert different.nonzero().tolist() == [[2, 4]]


@pytest.mark.parametrize("rows, columns", [(23, 23), (4, 5), (37, 20), (40, 37)])
def test_positions_are_opencv_s_bicubic_of_the_published_scale(rows, columns):
    backbone = randomised(MEGALOC_TINY, 0).backbone
    stored = backbone.pos_embed[0].numpy()
    got = run(backbone.position_embedding, rows, columns)[0].numpy()
    # a = -0.75, borders repeated; by factors OpenCV keeps them as they are, whatever the size comes to.
    factors = {"fx": (columns + 0.1) / 37, "fy": (rows + 0.1) / 37, "interpolation": cv2.INTER_CUBIC}
    grid = stored[1:].reshape(37, 37, -1)
    planes = [cv2.resize(np.ascontiguousarray(grid[..., i]), None, **factors) for i in range(grid.shape[2])]
    assert planes[0].shape == (rows, columns)
    np.testing.assert_array_equal(got[0], stored[0])
    np.testing.assert_allclose(got[1:], np.stack(planes, -1).reshape(rows * columns, -1), atol=1e-5)


def test_positions_of_the_stored_grid_are_those_stored():
    backbone = randomised(MEGALOC_TINY, 0).backbone
    assert torch.equal(backbone.position_embedding(37, 37), backbone.pos_embed)


def linear(x: np.ndarray, layer: torch.nn.Module) -> np.ndarray:
    """A linear layer, or a convolution of 1 x 1, on the last axis in float64."""
    weight = layer.weight.numpy().astype(np.float64)
    return x @ weight.reshape(len(weight), -1).T + layer.bias.numpy().astype(np.float64)


def unit(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


def plan(scores: np.ndarray, dust_bin: float, iterations: int) -> np.ndarray:
    """Optimal transport of n patches (n, m scores) to m clusters of mass 1 and a dust bin of n - m: (n, m + 1)."""
    n, m = scores.shape
    cost = np.column_stack([scores, np.full(n, dust_bin)])
    clusters, patches = np.zeros(m + 1), np.zeros(n)
    for _ in range(iterations):
        clusters = np.log([1.0] * m + [n - m]) - logsumexp(cost + patches[:, None], axis=0)
        patches = -logsumexp(cost + clusters, axis=1)
    return np.exp(cost + clusters + patches[:, None])


def in_numpy(model: MegaLoc, patches: np.ndarray, token: np.ndarray) -> np.ndarray:
    """SALAD, the last layer and the unit length, of one image: patches (n, dim) and token (dim,), in float64."""
    salad = model.aggregator.agg
    features = linear(np.maximum(linear(patches, salad.cluster_features[0]), 0), salad.cluster_features[3])
    scores = linear(np.maximum(linear(patches, salad.score[0]), 0), salad.score[3])
    assigned = plan(scores, float(salad.dust_bin), 3)[:, :-1]
    clusters = unit(assigned.T @ features)  # (m, cluster_dim), each of unit length
    image = unit(linear(np.maximum(linear(token, salad.token_features[0]), 0), salad.token_features[2]))
    together = unit(np.concatenate([image, clusters.T.ravel()]))  # channel by channel, in it cluster by cluster
    return unit(linear(together, model.aggregator.linear))


@pytest.mark.parametrize("config", BOTH, ids=lambda c: c.name)
def test_the_descriptor_is_that_of_float64(config):
    model = randomised(config, 1)
    image = images(2, config)
    patches, token = run(model.backbone, image)
    got = run(model, image).numpy()
    for i in range(2):
        expected = in_numpy(model, patches[i].flatten(1).T.numpy().astype(np.float64), token[i].numpy())
        np.testing.assert_allclose(got[i], expected, atol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 1, 10, 100])
def test_transport_gives_each_patch_whole_and_each_cluster_its_share(spread):
    scores = torch.randn(2, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * spread
    dust_bin = torch.tensor(0.7, dtype=torch.float64)
    assigned = transport(scores, dust_bin, 3).exp()
    assert assigned.shape == (2, 9, 20) and (assigned >= 0).all()
    torch.testing.assert_close(assigned.sum(dim=1), torch.ones(2, 20, dtype=torch.float64))
    for i in range(2):
        np.testing.assert_allclose(assigned[i].T, plan(scores[i].T.numpy(), 0.7, 3), atol=1e-9)


def test_transport_converges_to_its_marginals():
    scores = torch.randn(1, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assigned = transport(scores, torch.tensor(1.0), 300).exp()[0]
    expected = torch.tensor([1.0] * 8 + [12.0], dtype=torch.float64)
    torch.testing.assert_close(assigned.sum(dim=1), expected, atol=1e-9, rtol=0)


def test_transport_survives_extreme_scores():
    scores = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, 1e4, 3e4]]])
    assert torch.isfinite(transport(scores, torch.tensor(-1e4), 3).exp()).all()
    torch.testing.assert_close(sinkhorn(torch.zeros(1, 3, 4), 3).exp().sum(dim=2), torch.tensor([[1.0, 1.0, 2.0]]))


def test_descriptors_have_unit_length_and_a_batch_is_its_images():
    model, batch = randomised(MEGALOC_TINY, 0), images(3)
    together = run(model, batch)
    assert together.shape == (3, 64) and together.dtype == torch.float32
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3), atol=1e-6, rtol=0)
    singles = torch.cat([run(model, image[None]) for image in batch])
    torch.testing.assert_close(together, singles, atol=1e-6, rtol=0)
    assert torch.equal(run(model, batch), together)


def test_other_sizes_of_image():
    model = randomised(MEGALOC_TINY, 0)
    wide = run(model, torch.zeros(1, 3, 42, 98))
    assert wide.shape == (1, 64)
    for shape in [(1, 3, 50, 70), (1, 3, 56, 71), (1, 1, 56, 70), (3, 56, 70)]:
        with pytest.raises(DataError, match="megaloc-tiny, expected .B, 3, H, W., H and W multiples of 14"):
            model(torch.zeros(shape))
    with pytest.raises(DataError, match="has 2 x 4 patches, expected more than its 8 clusters"):
        model(torch.zeros(1, 3, 28, 56))


def test_random_weights_are_repeatable_and_leave_the_caller_s_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = randomised(MEGALOC_TINY, 0).state_dict()
    assert torch.equal(torch.rand(1), expected)
    again, other = randomised(MEGALOC_TINY, 0).state_dict(), randomised(MEGALOC_TINY, 1).state_dict()
    for name, value in first.items():
        assert torch.isfinite(value).all() and torch.equal(value, again[name]) and not torch.equal(value, other[name])


@pytest.mark.parametrize("config", BOTH, ids=lambda c: c.name)
def test_random_descriptors_tell_images_apart(config):
    """Of smooth images, as real ones are; patches of white noise differ less."""
    width, height = config.image_size
    coarse = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    found = run(randomised(config, 0), smooth)
    cosines = (found @ found.T)[~torch.eye(4, dtype=bool)]
    assert cosines.max() < 0.9 and cosines.min() > -1


# Constant in a row of the transport's scores: the first step takes it out, whatever it is.
WITHOUT_EFFECT = {"aggregator.agg.dust_bin", "aggregator.agg.score.3.bias"}


@pytest.mark.parametrize("name", sorted(expected_state(MEGALOC_TINY)))
def test_every_random_weight_matters(name):
    model, image = randomised(MEGALOC_TINY, 0), images(1)
    before = run(model, image)
    value = model.state_dict()[name]
    value += 0.5 * value.abs().mean() * torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
    changed = (run(model, image) - before).abs().max()
    assert changed < 1e-6 if name in WITHOUT_EFFECT else changed > 1e-4, f"{name} moves the descriptor by {changed}"
