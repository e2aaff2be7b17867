"""Numpy tables <-> ``sensor_msgs/PointCloud2``: one row a point, one named field a column.

PointField has no 64-bit integers and no fp16, so tables use the types of
``_DATATYPES`` only. Columns are packed in order without padding.
"""

from __future__ import annotations

import array

import numpy as np
from sensor_msgs.msg import PointCloud2, PointField

from ..errors import DataError

_DATATYPES = {
    PointField.INT8: "i1",
    PointField.UINT8: "u1",
    PointField.INT16: "i2",
    PointField.UINT16: "u2",
    PointField.INT32: "i4",
    PointField.UINT32: "u4",
    PointField.FLOAT32: "f4",
    PointField.FLOAT64: "f8",
}
_CODES = {text: code for code, text in _DATATYPES.items()}


def to_cloud(table: np.ndarray, header) -> PointCloud2:
    """A structured (N,) array as a cloud of N points: height 1, packed, little-endian.

    Args:
        table: columns of the types of PointField, in the order of the fields.
        header: the ``std_msgs/Header`` of the result.
    """
    table = np.ascontiguousarray(table)
    fields = table.dtype.fields
    return PointCloud2(
        header=header,
        height=1,
        width=len(table),
        fields=[
            PointField(name=name, offset=fields[name][1], datatype=_CODES[fields[name][0].str[1:]], count=1)
            for name in table.dtype.names
        ],
        is_bigendian=False,
        point_step=table.dtype.itemsize,
        row_step=table.dtype.itemsize * len(table),
        data=byte_array(table),
        is_dense=all(np.isfinite(table[n]).all() for n in table.dtype.names if table.dtype[n].kind == "f"),
    )


def from_cloud(cloud: PointCloud2, dtype: np.dtype) -> np.ndarray:
    """The columns of ``dtype`` of a cloud, found by name: a packed, native (N,) structured array.

    Offsets, steps, rows and byte order are those of the message; further
    fields are ignored.

    Raises:
        DataError: a field is missing or of another type, or the data is too short.
    """
    there = {f.name: f for f in cloud.fields}
    formats, offsets = [], []
    for name in dtype.names:
        field, wanted = there.get(name), dtype[name].str[1:]
        if field is None:
            raise DataError(f"cloud: no field '{name}'; the message has: {', '.join(there) or 'none'}")
        got = _DATATYPES.get(field.datatype, f"datatype {field.datatype}")
        if got != wanted or field.count not in (0, 1):  # some writers leave count at 0
            raise DataError(f"cloud: field '{name}' must be one {wanted}, got {field.count} x {got}")
        if field.offset + dtype[name].itemsize > cloud.point_step:
            raise DataError(f"cloud: field '{name}' at {field.offset} ends beyond point_step {cloud.point_step}")
        formats.append((">" if cloud.is_bigendian else "<") + wanted)
        offsets.append(field.offset)
    height, width, row_step = cloud.height, cloud.width, cloud.row_step
    if height * width == 0:
        return np.empty(0, dtype.newbyteorder("="))
    needed = row_step * (height - 1) + cloud.point_step * width
    if (height > 1 and row_step < cloud.point_step * width) or len(cloud.data) < needed:
        raise DataError(
            f"cloud: {height} x {width} points of {cloud.point_step} bytes with row_step {row_step} "
            f"need {needed} bytes, got {len(cloud.data)}"
        )
    source = np.dtype({"names": dtype.names, "formats": formats, "offsets": offsets, "itemsize": cloud.point_step})
    rows = np.ndarray((height, width), source, cloud.data, strides=(row_step, cloud.point_step))
    out = np.empty(height * width, dtype.newbyteorder("="))
    for name in dtype.names:
        out[name] = rows[name].ravel()
    return out


def byte_array(values: np.ndarray) -> array.array:
    """The bytes of an array in C order, in the one type that a message's setter takes without a slow check."""
    out = array.array("B")
    out.frombytes(np.ascontiguousarray(values).tobytes())
    return out
