"""Writers of tiny files in the official formats, independent of the readers."""

import dataclasses
import gzip
import hashlib
import io
import struct
import tarfile

import numpy as np

from applications.data.files import FILES

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def declare(monkeypatch, key, contents, **changes):
    """Make these contents the official ones."""
    parts = {part: f"sha256:{hashlib.sha256(content).hexdigest()}" for part, content in contents.items()}
    monkeypatch.setitem(FILES, key, dataclasses.replace(FILES[key], parts=parts, **changes))


def write(path, content):
    """Write a file, packed if its name ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = path.name.endswith(".gz") and not path.name.endswith(".tar.gz")
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(seed=0):
    """Arrays of five training and three test images, and the four contents."""
    rng = np.random.default_rng(seed)
    arrays = [
        array
        for count in (5, 3)
        for array in (
            rng.integers(256, size=(count, 28, 28), dtype=np.uint8),
            rng.integers(10, size=count).astype("u1"),
        )
    ]
    return arrays, dict(zip(IDX, map(idx, arrays), strict=True))


def cifar(pack, seed=0):
    """Six batches of two images, and their contents."""
    rng = np.random.default_rng(seed)
    batches = [(rng.integers(256, size=(2, 3, 32, 32), dtype=np.uint8), rng.integers(10, size=2)) for _ in BATCHES]
    return batches, {name: pack(*batch) for name, batch in zip(BATCHES, batches, strict=True)}


def binary_batch(x, y):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(x, y, strict=True))


def python2_batch(x, y):
    """The opcodes that Python 2 wrote, with its one type for text and bytes."""
    data = x.reshape(len(x), -1)
    shape = b"K" + bytes([len(x)]) + b"M" + struct.pack("<H", data.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    raw = b"T" + struct.pack("<i", data.nbytes) + data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape + dtype
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in y) + b"e"
    return b"\x80\x02}(U\x06labels" + labels + b"U\x04data" + array + b"\x89" + raw + b"tbu."


def archive(members):
    """A tar.gz of files; a value that is a string makes a symbolic link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
