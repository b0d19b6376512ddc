"""Parses a GGUF file of version 2 or 3: header, metadata, and where its tensors are.

A file is not trusted. Before memory is allocated or bytes are skipped, each length and
count is compared with the bytes that are left, and each tensor's place with the file's
size, so that nothing outside the file is read. The file is mapped into memory; arrays of
the metadata are decoded when they are used.
"""

import math
import mmap
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.gguf.block_types import TYPES, BlockType, type_name
from minfer.effects.models.gguf.split import split_paths
from minfer.effects.models.json_files import CorruptFileError
from minfer.extras import how_to_install

SUFFIX: Final = ".gguf"
MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ALIGNMENT: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 20
MAX_DIMENSIONS: Final = 4  # of a tensor, at most
# Limits of what a damaged file can cost, far above what published models have.
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 16
MAX_STRINGS: Final = 1 << 22  # strings in all arrays of a file
TEXT, ARRAY, BOOL = 8, 9, 7  # types of values
_SCALARS: Final = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    BOOL: Struct("<B"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MIN_PAIR_BYTES: Final = 8 + 4 + 1  # bytes: an empty key, a type, a number
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8  # bytes: an empty name, one dimension


class GgufError(CorruptFileError):
    """A GGUF file is damaged or inconsistent. The message names the place in the file."""


@frozen(eq=False)
class GgufArray:
    """An array of the metadata, decoded on demand."""

    path: Path
    data: mmap.mmap
    key: str
    kind: int  # of its elements
    count: int
    start: int  # byte of its first element

    def numbers(self) -> tuple[Any, ...]:
        """Returns its elements. Raises `GgufError` for strings."""
        if self.kind == TEXT:
            raise _error(self.path, self.start, f"{self.key} must hold numbers")
        code = _SCALARS[self.kind].format.removeprefix("<")
        return Struct(f"<{self.count}{code}").unpack_from(self.data, self.start)

    def texts(self) -> list[str]:
        """Returns its elements. Raises `GgufError` for numbers and invalid UTF-8."""
        if self.kind != TEXT:
            raise _error(self.path, self.start, f"{self.key} must hold strings")
        texts, offset, unpack_length = [], self.start, _U64.unpack_from
        for i in range(self.count):
            end = offset + 8 + unpack_length(self.data, offset)[0]
            try:
                texts.append(self.data[offset + 8 : end].decode())
            except UnicodeDecodeError as error:
                fault = f"element {i} of {self.key} is not UTF-8"
                raise _error(self.path, offset, fault) from error
            offset = end
        return texts


Value = int | float | bool | str | GgufArray


@frozen
class StoredTensor:
    """Where a tensor is in the file, and its type."""

    name: str
    shape: tuple[int, ...]  # the last dimension is contiguous
    type: BlockType
    start: int  # byte in the file
    size: int  # bytes
    # The whole file; copied on write, so that torch can view it.
    data: mmap.mmap = field(eq=False, repr=False)


@frozen(eq=False)
class GgufFile:
    """The metadata of a file, or of the first of a split model's, and where the tensors
    of all of them are.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


def is_gguf(path: Path) -> bool:
    """Returns whether a path ends as those of GGUF files do; the file may be missing."""
    return path.suffix.lower() == SUFFIX


def read_gguf(path: str | Path) -> GgufFile:
    """Returns a parsed file, of a split model all of them. The last two models are
    cached.

    Raises `GgufError`, and `UnsupportedModelError` for valid files of a version, or with
    types, that are not supported.
    """
    path = Path(path)
    try:
        return _read_all(tuple(map(_Identity.of, split_paths(path))))
    except OSError as error:
        fault = f"cannot be read ({error.strerror or error}); check the path"
        raise GgufError(f"{error.filename or path}: {fault}") from error


@frozen
class _Identity:
    """A file as it is now: another one of its name is not equal."""

    path: Path
    size: int  # bytes
    modified: int  # nanoseconds
    inode: int

    @classmethod
    def of(cls, path: Path) -> "_Identity":
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=2)  # a model and its draft model
def _read_all(identities: tuple[_Identity, ...]) -> GgufFile:
    """Returns the files of a model as one."""
    first, *others = (_read(identity.path, identity.size) for identity in identities)
    tensors = dict(first.tensors)
    for number, file in enumerate((first, *others)):
        count = file.metadata.get("split.count", 0) or 1
        if count != len(identities) or file.metadata.get("split.no", 0) != number:
            raise GgufError(
                f"{file.path}: metadata split.count = {count!r:.100} and split.no = "
                f"{file.metadata.get('split.no', 0)!r:.100}, but by its name it is file "
                f"{number + 1} of {len(identities)}; files of a split model are named as "
                f"llama-gguf-split names them, NAME-00001-of-00002.gguf"
            )
    for file in others:
        if twice := sorted(tensors.keys() & file.tensors.keys()):
            raise GgufError(
                f"{file.path}: tensor {twice[0]} is in an earlier file, too; download "
                f"the files again"
            )
        tensors.update(file.tensors)
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if others and expected != len(tensors):
        raise GgufError(
            f"{first.path}: metadata split.tensors.count = {expected!r:.100}, but the "
            f"{len(identities)} files have {len(tensors)}; download them again"
        )
    return evolve(first, tensors=tensors)


def _read(path: Path, size: int) -> GgufFile:
    if size < len(MAGIC) + 4 + 8 + 8:
        raise _error(path, size, "the file ends within its header")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    if data[:4] != MAGIC:
        raise _error(path, 0, f"a GGUF file begins with {MAGIC!r}, not {data[:4]!r}")
    cursor = _Cursor(path, data, size)
    cursor.offset = 4
    version = cursor.number(_U32, "the version")
    _check_version(path, version)
    tensors = cursor.count("tensors", _MIN_TENSOR_BYTES, MAX_TENSORS, bytes_before=8)
    pairs = cursor.count("metadata keys", _MIN_PAIR_BYTES, MAX_KEYS)
    metadata = _read_metadata(cursor, pairs)
    alignment = _alignment(cursor, metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT))
    if cursor.left // _MIN_TENSOR_BYTES < tensors:
        raise cursor.error(f"{tensors} tensors do not fit into the rest of the file")
    return GgufFile(path, metadata, _read_tensors(cursor, tensors, alignment))


class _Cursor:
    """A position in a file. Reads past the end raise `GgufError`."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.offset = 0
        self.texts = 0  # in arrays, so far

    @property
    def left(self) -> int:
        return self.size - self.offset

    def error(self, fault: str) -> GgufError:
        return _error(self.path, self.offset, fault)

    def take(self, size: int, label: str) -> int:
        """Moves past `size` bytes, and returns the position before them."""
        if size > self.left:
            raise self.error(f"{label} takes {size} bytes, but {self.left} are left")
        start, self.offset = self.offset, self.offset + size
        return start

    def number(self, layout: Struct, label: str) -> Any:
        return layout.unpack_from(self.data, self.take(layout.size, label))[0]

    def count(
        self, label: str, min_bytes: int, max_count: int, bytes_before: int = 0
    ) -> int:
        """Reads the number of items that follow, of at least `min_bytes` bytes each;
        `bytes_before` bytes come before them.
        """
        start, count = self.offset, int(self.number(_U64, f"the number of {label}"))
        if count > min(max_count, (self.left - bytes_before) // min_bytes):
            left = f"{self.left} bytes are left"
            limits = f"{left}, and at most {max_count} {label} are read"
            raise _error(self.path, start, f"the number of {label} is {count}; {limits}")
        return count

    def text(self, label: str) -> str:
        start = self.offset
        length = self.number(_U64, f"the length of {label}")
        begin = self.take(length, label)
        try:
            return self.data[begin : self.offset].decode()
        except UnicodeDecodeError as error:
            raise _error(self.path, start, f"{label} is not UTF-8") from error


def _read_metadata(cursor: _Cursor, pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    label = "metadata key 0"
    for i in range(pairs):
        start, key = cursor.offset, cursor.text(label)
        if key in metadata:
            raise _error(cursor.path, start, f"metadata key {key!r} is there twice")
        metadata[key] = _read_value(cursor, key)
        label = f"metadata key {i + 1}, after {key!r:.100},"
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number(_U32, f"the type of {key}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind == TEXT:
        return cursor.text(key)
    if kind not in _SCALARS:
        raise cursor.error(f"{key} has the unknown type {kind}")
    value: int | float = cursor.number(_SCALARS[kind], key)
    if kind != BOOL:
        return value
    if value not in (0, 1):
        raise cursor.error(f"{key} must be 0 or 1, as it is a bool, not {value}")
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> GgufArray:
    kind = cursor.number(_U32, f"the type of the elements of {key}")
    if kind == ARRAY:
        raise UnsupportedModelError(
            f"{cursor.path}: metadata {key} is an array of arrays, which is not "
            f"supported; give the Hugging Face checkpoint that the file was made from"
        )
    if kind != TEXT and kind not in _SCALARS:
        raise cursor.error(f"the elements of {key} have the unknown type {kind}")
    # A string takes at least the bytes of its length.
    element_bytes = 8 if kind == TEXT else _SCALARS[kind].size
    max_count = MAX_STRINGS - cursor.texts if kind == TEXT else cursor.size
    count = cursor.count(f"elements of {key}", element_bytes, max_count)
    array = GgufArray(cursor.path, cursor.data, key, kind, count, cursor.offset)
    if kind != TEXT:
        cursor.take(count * element_bytes, key)
        return array
    cursor.texts += count
    data, unpack_length = cursor.data, _U64.unpack_from
    offset, last_offset = cursor.offset, cursor.size - 8
    for i in range(count):
        if offset > last_offset:
            raise cursor.error(f"the file ends within element {i} of {key}")
        offset += 8 + unpack_length(data, offset)[0]
    if offset > cursor.size:
        raise cursor.error(f"the file ends within the last element of {key}")
    cursor.offset = offset
    return array


def _alignment(cursor: _Cursor, value: Value) -> int:
    in_range = type(value) is int and 8 <= value <= MAX_ALIGNMENT
    if not isinstance(value, int) or not in_range or value & (value - 1):
        expected = f"a power of two from 8 to {MAX_ALIGNMENT}"
        raise cursor.error(f"{ALIGNMENT} must be {expected}, not {value!r}")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    """Returns where tensors are. They must be within the file and not overlap."""
    tensors: dict[str, StoredTensor] = {}
    description_offsets: dict[str, int] = {}  # the bytes where their descriptions begin
    label = "the name of tensor 0"
    for i in range(count):
        start = cursor.offset
        tensor = _read_tensor(cursor, label)
        if tensor.name in tensors:
            raise _error(cursor.path, start, f"tensor {tensor.name!r} is there twice")
        if tensor.start % alignment:
            fault = f"offset {tensor.start} of tensor {tensor.name} is no multiple of"
            raise _error(cursor.path, start, f"{fault} {alignment}")
        tensors[tensor.name], description_offsets[tensor.name] = tensor, start
        label = f"the name of tensor {i + 1}, after {tensor.name!r:.100},"
    base = -(-cursor.offset // alignment) * alignment
    end, previous_name = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        span = f"tensor {tensor.name} (offset {tensor.start}, {tensor.size} bytes)"
        offset = description_offsets[tensor.name]
        if tensor.start < end:
            raise _error(cursor.path, offset, f"{span} overlaps tensor {previous_name}")
        end, previous_name = tensor.start + tensor.size, tensor.name
        if end > cursor.size - base:
            fault = f"extends past the end of the file, which has {cursor.size} bytes"
            data_start = f"tensors begin at byte {base}"
            raise _error(cursor.path, offset, f"{span} {fault}; {data_start}")
    return {
        name: StoredTensor(
            name, tensor.shape, tensor.type, base + tensor.start, tensor.size, cursor.data
        )
        for name, tensor in tensors.items()
    }


def _read_tensor(cursor: _Cursor, label: str) -> StoredTensor:
    """Returns a tensor, whose `start` is its offset from the byte where tensors begin.
    Errors about its name call the name `label`.
    """
    name = cursor.text(label)
    label = f"tensor {name}"
    dimensions = cursor.number(_U32, f"the number of dimensions of {label}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(
            f"{label} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}"
        )
    sizes = [cursor.number(_U64, f"a dimension of {label}") for _ in range(dimensions)]
    kind = cursor.number(_U32, f"the type of {label}")
    start = cursor.number(_U64, f"the offset of {label}")
    if (block_type := TYPES.get(kind)) is None:
        supported = ", ".join(block_type.name for block_type in TYPES.values())
        raise UnsupportedModelError(
            f"{cursor.path}: {label} has type {type_name(kind)}, which is not supported; "
            f"{supported} are. Use a file in which all tensors have one of these types"
        )
    if block_type.by_package and find_spec("gguf") is None:
        raise UnsupportedModelError(
            f"{cursor.path}: {label} has type {block_type.name}, which the gguf package "
            f"dequantizes; it is not installed: {how_to_install('gguf')}"
        )
    if sizes[0] % block_type.elements or 0 in sizes:
        raise cursor.error(
            f"{label} has shape {sizes[::-1]}; rows of {block_type.name} are multiples "
            f"of {block_type.elements}, and no dimension is 0"
        )
    size = math.prod(sizes) // block_type.elements * block_type.size
    return StoredTensor(name, tuple(sizes[::-1]), block_type, start, size, cursor.data)


def _check_version(path: Path, version: int) -> None:
    if version in VERSIONS:
        return
    fault = f"GGUF version {version} is not supported"
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        fault = "big-endian files are not supported"
    supported = " and ".join(map(str, VERSIONS))
    raise UnsupportedModelError(
        f"{path}: {fault}; little-endian files of versions {supported} are. Convert the "
        f"model again with a current llama.cpp"
    )


def _error(path: Path, offset: int, fault: str) -> GgufError:
    return GgufError(f"{path}: at byte {offset}: {fault}; download the file again")
