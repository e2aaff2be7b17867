"""``.npy`` files: what numpy writes is read, any damage is a MapFileError."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.errors import MapFileError
from vslam_features.exchange.npy_file import read_npy


@pytest.mark.parametrize("type_code", ["|b1", "|u1", "<i4", ">i4", "<f2", "<f8", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
@pytest.mark.parametrize("order", "CF")
def test_arrays_are_read_as_numpy_wrote_them(tmp_path, type_code, shape, order):
    array = np.array(np.arange(np.prod(shape, dtype=int)).reshape(shape), type_code, order=order)
    np.save(tmp_path / "a.npy", array)
    read = read_npy(tmp_path / "a.npy")
    assert read.dtype == array.dtype.newbyteorder("=") and read.shape == shape
    np.testing.assert_array_equal(read, array)


def test_a_type_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.eye(3))
    path.write_bytes(path.read_bytes().replace(b"<f8", b"\x80f8"))
    with pytest.raises(MapFileError, match="a.npy"):
        read_npy(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 199), st.integers(0, 255), st.booleans())
def test_damage_is_an_error_or_an_array(tmp_path, place, byte, cut):
    path = tmp_path / "a.npy"
    np.save(path, np.eye(3))
    content = bytearray(path.read_bytes())
    assert len(content) == 200
    content[place] = byte
    path.write_bytes(content[:place] if cut else content)
    try:
        assert isinstance(read_npy(path), np.ndarray)
    except MapFileError as error:
        assert str(path) in str(error)
