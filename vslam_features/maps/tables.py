"""The tables of a map file as data: what ``docs/map_format.md`` describes, what is created, checked and read.

A row is written once. Its ``crc`` covers its plain columns, those of its arrays cover their bytes, so that no damage
goes unnoticed. Only ``meta`` changes, in the transaction of each keyframe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

APPLICATION_ID = 0x564D4150  # "VMAP"
SCHEMA_VERSION = 1
PAGE_SIZE = 8192
"""Small enough that the last page of a row wastes little, large enough that 2 MB are read in few calls."""


@dataclass(frozen=True)
class Column:
    """A plain column. ``kind``: INTEGER, REAL or TEXT. ``references``: the table whose id it is."""

    name: str
    kind: str
    optional: bool = False
    references: str = ""


@dataclass(frozen=True)
class ArrayColumn:
    """An array: columns NAME_dtype, NAME_shape, NAME_crc and, at the row's end, NAME with the bytes.

    Args:
        dtypes: those allowed.
        shape: one entry an axis, a number where it is fixed, else None; the axes of ``also`` are allowed as well.
        optional: all four columns may be NULL.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]
    optional: bool = False
    also: tuple[int | None, ...] | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True for a shape that this array may have."""
        allowed = [s for s in (self.shape, self.also) if s is not None and len(s) == len(shape)]
        return any(all(want in (None, got) for want, got in zip(s, shape)) for s in allowed)


@dataclass(frozen=True)
class Table:
    """A table; its first column is ``id INTEGER PRIMARY KEY``, its last plain one ``crc``."""

    name: str
    columns: tuple[Column, ...]
    arrays: tuple[ArrayColumn, ...] = ()

    @cached_property
    def plain(self) -> list[str]:
        """Names of the columns that the row's checksum covers, in order."""
        described = [f"{a.name}_{part}" for a in self.arrays for part in ("dtype", "shape", "crc")]
        return ["id", *(c.name for c in self.columns), *described]

    @cached_property
    def array(self) -> dict[str, ArrayColumn]:
        """Arrays by name."""
        return {a.name: a for a in self.arrays}

    @cached_property
    def select(self) -> str:
        """Reads the plain columns, the row's checksum, and the lengths of the arrays in bytes."""
        # length() of a blob is read from the row's header, without its bytes.
        lengths = [f"length({a.name})" for a in self.arrays]
        return f"SELECT {', '.join([*self.plain, 'crc', *lengths])} FROM {self.name}"

    @property
    def sql(self) -> str:
        """The statement that creates it; a file's must be equal."""
        lines = ["id INTEGER PRIMARY KEY"]
        for c in self.columns:
            reference = f" REFERENCES {c.references}(id)" if c.references else ""
            lines.append(f"{c.name} {c.kind}{'' if c.optional else ' NOT NULL'}{reference}")
        for a in self.arrays:
            null = "" if a.optional else " NOT NULL"
            lines += [f"{a.name}_dtype TEXT{null}", f"{a.name}_shape TEXT{null}", f"{a.name}_crc INTEGER{null}"]
        lines.append("crc INTEGER NOT NULL")
        lines += [f"{a.name} BLOB{'' if a.optional else ' NOT NULL'}" for a in self.arrays]
        return f"CREATE TABLE {self.name} (\n  " + ",\n  ".join(lines) + "\n)"


def _integers(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "INTEGER") for name in names)


META = Table(
    "meta",
    (
        Column("software", "TEXT"),
        *_integers("created_ns", "keyframes", "global_descriptors", "matches", "loops", "payload_bytes"),
    ),
)
MODELS = Table("models", tuple(Column(name, "TEXT") for name in ("role", "name", "sha256", "preprocessing")))
CAMERAS = Table(
    "cameras",
    (*_integers("width", "height"), Column("model", "TEXT"), Column("rectified", "INTEGER")),
    (ArrayColumn("K", ("float64",), (3, 3)), ArrayColumn("D", ("float64",), (None,))),
)
SESSIONS = Table("sessions", (Column("started_ns", "INTEGER"), Column("software", "TEXT")))
KEYFRAMES = Table(
    "keyframes",
    (
        Column("session", "INTEGER", references="sessions"),
        Column("stamp_ns", "INTEGER"),
        Column("frame_id", "TEXT"),
        Column("camera", "INTEGER", optional=True, references="cameras"),
        *_integers("width", "height", "num_keypoints"),
        Column("pose_frame_id", "TEXT", optional=True),
        Column("pose_scale_known", "INTEGER", optional=True),
        *_integers("has_global_descriptor", "first_match", "num_matches", "first_loop", "num_loops"),
    ),
    (ArrayColumn("pose", ("float64",), (3, 4), optional=True),),
)
FEATURES = Table(
    "features",
    (Column("model", "INTEGER", references="models"), Column("pixel_scale", "REAL"), Column("recovered", "TEXT")),
    (
        ArrayColumn("keypoints", ("float32",), (None, 2)),
        ArrayColumn("scores", ("float32",), (None,)),
        ArrayColumn("thumbnail", ("uint8",), (None, None), optional=True, also=(None, None, 3)),
        ArrayColumn("descriptors", ("float16", "float32", "uint8"), (None, None), also=(None, None, None)),
    ),
)
GLOBAL_DESCRIPTORS = Table(
    "global_descriptors",
    (Column("model", "INTEGER", references="models"),),
    (ArrayColumn("descriptor", ("float16", "float32"), (None,)),),
)
MATCHES = Table(
    "matches",
    (
        Column("keyframe", "INTEGER", references="keyframes"),
        Column("reference", "INTEGER", references="keyframes"),
        *_integers("kind", "status"),
        Column("covisibility", "REAL", optional=True),
        Column("stopped_after_layer", "INTEGER"),
        Column("geometry", "TEXT", optional=True),
        Column("scale_known", "INTEGER", optional=True),
        Column("elapsed_ms", "REAL"),
        Column("runtime", "TEXT"),
        Column("detail", "TEXT"),
    ),
    (
        ArrayColumn("pose", ("float64",), (3, 4), optional=True),
        ArrayColumn("hypotheses", ("float64",), (None, 3, 4), optional=True),
        ArrayColumn("pairs", ("int32",), (None, 2)),
        ArrayColumn("scores", ("float32",), (None,)),
        ArrayColumn("inliers", ("bool",), (None,)),
    ),
)
LOOPS = Table(
    "loops",
    (
        Column("keyframe", "INTEGER", references="keyframes"),
        Column("reference", "INTEGER", references="keyframes"),
        Column("similarity", "REAL"),
        Column("margin", "REAL", optional=True),
        *_integers("rank", "gated"),
        Column("status", "INTEGER", optional=True),
    ),
)

TABLES = (META, MODELS, CAMERAS, SESSIONS, KEYFRAMES, FEATURES, GLOBAL_DESCRIPTORS, MATCHES, LOOPS)
