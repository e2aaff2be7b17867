"""Loading MegaLoc: safetensors and .pth give the network saved, anything else the error that says what it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from vslam_features.errors import WeightsError  # noqa: E402
from vslam_features.networks.megaloc import MEGALOC, MEGALOC_TINY, load, randomised  # noqa: E402

IMAGE = torch.randn(1, 3, 56, 70, generator=torch.Generator().manual_seed(0))
STATE = randomised(MEGALOC_TINY, 0).state_dict()


def copy() -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in STATE.items()}


def write(tensors: dict[str, torch.Tensor], path):
    """As safetensors, or by torch.save where the name says so."""
    if path.suffix == ".safetensors":
        safetensors.save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_what_was_saved_is_loaded(tmp_path, name):
    model = load(MEGALOC_TINY, write(copy(), tmp_path / name))
    assert list(model.state_dict()) == list(STATE) and not model.training
    assert all(torch.equal(value, STATE[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(IMAGE), randomised(MEGALOC_TINY, 0)(IMAGE))
    assert not any(p.requires_grad for p in model.parameters())


def test_a_checkpoint_with_a_state_dict_and_the_old_format(tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"epoch": 3, "state_dict": copy()}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load(MEGALOC_TINY, path).backbone.pos_embed, STATE["backbone.pos_embed"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_other_floats_become_float32(tmp_path, dtype, name):
    path = write({key: value.to(dtype) for key, value in STATE.items()}, tmp_path / name)
    for key, value in load(MEGALOC_TINY, path).state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, STATE[key].to(dtype).float())


@settings(deadline=None, max_examples=30)
@given(
    missing=st.sets(st.sampled_from(sorted(STATE)), max_size=8),
    shapes=st.sets(st.sampled_from(sorted(STATE)), max_size=8),
    unexpected=st.integers(0, 8),
)
def test_every_difference_is_counted_and_some_are_named(tmp_path_factory, missing, shapes, unexpected):
    shapes -= missing
    tensors = {name: value for name, value in copy().items() if name not in missing}
    tensors |= {name: torch.zeros(*STATE[name].shape, 2) for name in shapes}
    tensors |= {f"extra.{i}": torch.zeros(2) for i in range(unexpected)}
    path = write(tensors, tmp_path_factory.getbasetemp() / "other.safetensors")
    if not (missing or shapes or unexpected):
        load(MEGALOC_TINY, path)
        return
    with pytest.raises(WeightsError) as caught:
        load(MEGALOC_TINY, path)
    message = str(caught.value)
    assert message.startswith(f"{path} is not the weights of megaloc-tiny (49 tensors): ")
    for names, kind in ((missing, "missing"), (shapes, "of another shape")):
        assert (f"{len(names)} {kind}" in message) == bool(names)
        ordered = [name for name in STATE if name in names]
        assert all(name in message for name in ordered[:5]) and not any(f"({name}" in message for name in ordered[5:])
        assert all(f"{name} {(*STATE[name].shape, 2)}, expected" in message for name in ordered[:5] if name in shapes)
    assert (f"{unexpected} unexpected (extra.0" in message) == bool(unexpected)
    assert len(message) < 3000


@pytest.mark.parametrize(
    "tensors, message",
    [
        (STATE, "189 tensors.: 140 missing .backbone.blocks.2.norm1.weight, .*seems to be a MegaLoc of other sizes"),
        (
            {name.replace("backbone.", "backbone.model."): value for name, value in STATE.items()},
            "unexpected .*megaloc.torch of the first release, whose names differ.*Take model.safetensors",
        ),
        (
            {name[9:]: value for name, value in STATE.items() if name.startswith("backbone.")},
            "189 missing .*seems to be a vision transformer alone, such as DINOv2",
        ),
        ({"conv.weight": torch.zeros(2, 2)}, "189 missing .*1 unexpected .conv.weight.. Take"),
    ],
    ids=["other sizes", "first release", "dinov2", "another network"],
)
def test_the_file_of_another_network_is_recognised(tmp_path, tensors, message):
    path = write({name: value.clone() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        load(MEGALOC, path)


def test_names_of_a_file_that_others_made_cannot_move_the_cursor_of_a_terminal(tmp_path):
    path = write({**copy(), "\x1b[2Jevil\n": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 unexpected \(\\x1b\[2Jevil\\n\)"):
        load(MEGALOC_TINY, path)


def test_integers_and_numbers_that_are_none_are_refused(tmp_path):
    path, tensors = tmp_path / "model.safetensors", copy()
    tensors["backbone.norm.bias"] = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(WeightsError, match="1 of another type .backbone.norm.bias int32, expected a float"):
        load(MEGALOC_TINY, write(tensors, path))
    for value in (np.nan, np.inf):
        tensors = copy()
        tensors["backbone.blocks.1.ls2.gamma"][3] = value
        with pytest.raises(WeightsError, match="backbone.blocks.1.ls2.gamma has NaN or infinity"):
            load(MEGALOC_TINY, write(tensors, path))


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_a_file_cut_short_is_said_to_be(tmp_path, name):
    path = write(copy(), tmp_path / name)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=f"{name} .* bytes. gives no weights: .*(cut short|incomplete|fetch)"):
            load(MEGALOC_TINY, path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_a_file_of_the_released_size_is_loaded(tmp_path, name):
    saved = randomised(MEGALOC, 0).state_dict()
    path = write(saved, tmp_path / name)
    assert abs(path.stat().st_size - 914.6e6) < 0.1e6
    model = load(MEGALOC, path)
    path.unlink()
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
