"""Readers of data files, splits and generated data."""

import gzip
import json
import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import official
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from official import BATCHES, IDX, declare, write

from applications import data
from applications.data import formats
from applications.data.files import FILES

TEXTS = {"train": b" the cat <unk>\n\n the dog \n", "valid": b" dog the\n", "test": b" cat\n cat\n"}


def same(images, expected):
    for found, array in zip((images.train_x, images.train_y, images.test_x, images.test_y), expected, strict=True):
        np.testing.assert_array_equal(found.numpy(), array)
    assert images.train_x.dtype == images.test_x.dtype == torch.uint8
    assert images.train_y.dtype == images.test_y.dtype == torch.int64


def assert_helpful(message, path, root, *checksums):
    """An error names the file, the checksums, and the command that helps."""
    assert str(path) in message
    assert all(checksum in message for checksum in checksums)
    assert re.search(r"python -m applications download \w+ --data " + re.escape(shlex.quote(str(root))), message)


def test_the_table_is_well_formed():
    for files in FILES.values():
        assert files.name in ("mnist", "fashion_mnist", "cifar10", "ptb", "wikitext2")
        for checksum in files.parts.values():
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", checksum)
        checksums = list(files.parts.values())
        assert len(set(checksums)) == len(checksums)


@given(arrays(np.uint8, array_shapes(min_dims=1, max_dims=4, min_side=0)))
def test_idx_round_trip(array):
    np.testing.assert_array_equal(formats.idx(official.idx(array), array.ndim, Path("x")), array)


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name in ("mnist", "fashion_mnist") for place in FILES[name].places]
)
def test_mnist_in_every_place(tmp_path, monkeypatch, name, place):
    (train_x, train_y, test_x, test_y), contents = official.mnist()
    declare(monkeypatch, name, contents)
    for part, content in contents.items():
        write(tmp_path / place.format(part), content)
    same(data.images(name, tmp_path), (train_x[:, None], train_y, test_x[:, None], test_y))


def python3_batch(x, y):
    return pickle.dumps({"data": x.reshape(len(x), -1), "labels": y.tolist(), "filenames": ["a", "b"]}, protocol=4)


CIFAR = [
    ("cifar10", official.binary_batch, "binary"),
    ("cifar10_python", official.python2_batch, "python"),
    ("cifar10_python", python3_batch, "python"),
]


@pytest.mark.parametrize(("key", "pack", "part"), CIFAR)
@pytest.mark.parametrize("layout", [0, 1, "archive 0", "archive 1"])
def test_cifar_in_every_layout(tmp_path, monkeypatch, key, pack, part, layout):
    batches, contents = official.cifar(pack)
    declare(monkeypatch, key, contents)
    if isinstance(layout, int):
        for batch, content in contents.items():
            write(tmp_path / FILES[key].places[layout].format(batch), content)
    else:
        folder, suffix = {"binary": ("bin", ".bin"), "python": ("py", "")}[part]
        packed = official.archive({f"cifar-10-batches-{folder}/{b}{suffix}": c for b, c in contents.items()})
        declare(monkeypatch, "cifar10_archive", {part: packed})
        write(tmp_path / ("cifar10" if layout == "archive 0" else ".") / f"cifar-10-{part}.tar.gz", packed)
    x, y = (np.concatenate(arrays) for arrays in zip(*batches[:5], strict=True))
    same(data.images("cifar10", tmp_path), (x, y, *batches[5]))


def test_the_place_of_downloads_comes_first(tmp_path, monkeypatch):
    """Otherwise a download would not help against a damaged file elsewhere."""
    _, contents = official.mnist()
    declare(monkeypatch, "mnist", contents)
    for part, content in contents.items():
        write(FILES["mnist"].target(part, tmp_path), content)
        write(tmp_path / "MNIST" / "raw" / part, b"damaged")
    data.images("mnist", tmp_path)
    (tmp_path / "mnist" / f"{IDX[0]}.gz").unlink()
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "MNIST" / "raw" / IDX[0]))):
        data.images("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "ptb", "wikitext2"])
def test_a_missing_file(tmp_path, name):
    root = tmp_path / "my data"
    read = data.text if name in ("ptb", "wikitext2") else data.images
    with pytest.raises(FileNotFoundError) as error:
        read(name, root)
    first, checksum = next(iter(FILES[name].parts.items()))
    assert_helpful(str(error.value), FILES[name].target(first, root), root, checksum)


def test_a_missing_batch(tmp_path, monkeypatch):
    _, contents = official.cifar(official.binary_batch)
    declare(monkeypatch, "cifar10", contents)
    for batch in (*BATCHES[:2], *BATCHES[3:]):
        write(FILES["cifar10"].target(batch, tmp_path), contents[batch])
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin does not exist"):
        data.images("cifar10", tmp_path)


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("part", IDX)
@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: flip(raw, 0),
        lambda raw: raw[:10] + b"\xff" + raw[11:],  # a kind of block that there is not, if it is packed
        lambda raw: flip(raw, len(raw) // 2),
    ],
    ids=["empty", "cut", "first byte", "first block", "middle"],
)
def test_a_damaged_file(tmp_path, monkeypatch, packed, part, damage):
    _, contents = official.mnist()
    declare(monkeypatch, "mnist", contents)
    paths = {p: write(tmp_path / "mnist" / (p + ".gz" * packed), content) for p, content in contents.items()}
    paths[part].write_bytes(damage(paths[part].read_bytes()))
    with pytest.raises(ValueError, match="is damaged") as error:
        data.images("mnist", tmp_path)
    found = r"it has sha256:[0-9a-f]{64}|it cannot be unpacked \(.+\)"
    assert re.search(found, str(error.value))
    assert_helpful(str(error.value), paths[part], tmp_path, FILES["mnist"].parts[part])


def test_a_damaged_archive(tmp_path, monkeypatch):
    """Damaged as a whole; or with the right checksum, but without a batch, or with another one."""
    _, contents = official.cifar(official.binary_batch)
    declare(monkeypatch, "cifar10", contents)
    members = {f"cifar-10-batches-bin/{batch}.bin": content for batch, content in contents.items()}
    last = "cifar-10-batches-bin/test_batch.bin"
    cases = [
        (official.archive(members)[:-9], "it has sha256"),
        (official.archive(members | {last: b"other"}), "test_batch.bin is damaged"),
        (official.archive({name: content for name, content in members.items() if name != last}), f"no file {last}"),
        (official.archive(members | {last: "data_batch_1.bin"}), f"no file {last}"),
        (official.archive(members)[:-20_000], "cannot be unpacked"),
        (b"not an archive", "cannot be unpacked"),
    ]
    for number, (packed, message) in enumerate(cases):
        declare(monkeypatch, "cifar10_archive", {"binary": packed if number else b"other"})
        path = write(tmp_path / "cifar10" / "cifar-10-binary.tar.gz", packed)
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            data.images("cifar10", tmp_path)
        assert_helpful(str(error.value), path, tmp_path)


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        (IDX[0], b"", "starts with 00000803"),
        (IDX[0], b"\0\0\x08\x03\0\0", "this one with 000008030000"),
        (IDX[0], official.idx(np.zeros(5, np.uint8)), "starts with 00000803"),
        (IDX[0], b"\0\0\x0d\x03" + official.idx(np.zeros((5, 2, 2), np.uint8))[4:], "this one with 00000d03"),
        (IDX[0], official.idx(np.zeros((5, 2, 2), np.uint8))[:-1], r"shape is \(5, 2, 2\), but 19 values"),
        (IDX[0], official.idx(np.zeros((5, 2, 2), np.uint8)) + b"\0", "but 21 values"),
        (IDX[1], official.idx(np.zeros(4, np.uint8)), "4 labels for 5 images"),
        (IDX[3], official.idx(np.full(3, 10, np.uint8)), "labels go from 0 to 9, found 10"),
    ],
)
def test_wrong_idx_files(tmp_path, monkeypatch, part, content, message):
    """Even with the right checksum."""
    contents = official.mnist()[1] | {part: content}
    declare(monkeypatch, "mnist", contents)
    for name in IDX:
        write(tmp_path / "mnist" / name, contents[name])
    with pytest.raises(ValueError, match=message) as error:
        data.images("mnist", tmp_path)
    assert str(tmp_path / "mnist" / part) in str(error.value)


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("bomb"),)


ZEROS = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Bomb(), "is not allowed"),
        ({"data": ZEROS, "labels": [0, 1], "extra": Bomb()}, "is not allowed"),
        ([ZEROS], "has data of type uint8"),
        ({"data": ZEROS[:, :-1], "labels": [0, 1]}, "has data of type uint8"),
        ({"data": ZEROS.astype(float), "labels": [0, 1]}, "has data of type uint8"),
        ({"data": ZEROS}, "has a list of labels"),
        ({"data": ZEROS, "labels": [0, 300]}, "has a list of labels"),
    ],
)
def test_wrong_pickles(tmp_path, monkeypatch, batch, message):
    """Nothing in a pickle is run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        formats.cifar_python(pickle.dumps(batch, protocol=4), Path("some file"))
    assert str(error.value).startswith("some file: ")
    assert not Path("bomb").exists()


def test_wrong_batches():
    for content in (b"", bytes(3072), bytes(3074)):
        with pytest.raises(ValueError, match="records of 3073 bytes"):
            formats.cifar_binary(content, Path("x"))
    with pytest.raises(ValueError, match="cannot be unpickled"):
        formats.cifar_python(official.python2_batch(*official.cifar(official.python2_batch)[0][0])[:-9], Path("x"))


def test_labels_of_batches_are_checked(tmp_path, monkeypatch):
    _, contents = official.cifar(python3_batch)
    contents["test_batch"] = pickle.dumps({"data": ZEROS, "labels": [0, 1, 2]}, protocol=4)
    declare(monkeypatch, "cifar10_python", contents)
    for batch, content in contents.items():
        write(FILES["cifar10_python"].target(batch, tmp_path), content)
    with pytest.raises(ValueError, match="test_batch: 3 labels for 2 images"):
        data.images("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name in ("ptb", "wikitext2") for place in FILES[name].places]
)
def test_texts_in_every_place(tmp_path, monkeypatch, name, place):
    declare(monkeypatch, name, TEXTS)
    for part, content in TEXTS.items():
        write(tmp_path / place.format(part), content)
    text = data.text(name, tmp_path)
    assert text.vocabulary == ("the", "cat", "<unk>", "<eos>", "dog")
    assert text.train.tolist() == [0, 1, 2, 3, 3, 0, 4, 3]
    assert text.valid.tolist() == [4, 0, 3]
    assert text.test.tolist() == [1, 3, 1, 3]
    assert text.train.dtype == torch.int64


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [("test", b" cat\n bird\n", r"line 2: the word 'bird' is not in"), ("valid", b"\xff", "is not UTF-8")],
)
def test_wrong_texts(tmp_path, monkeypatch, part, content, message):
    declare(monkeypatch, "ptb", TEXTS | {part: content})
    for name, text in (TEXTS | {part: content}).items():
        write(FILES["ptb"].target(name, tmp_path), text)
    with pytest.raises(ValueError, match=message) as error:
        data.text("ptb", tmp_path)
    assert f"ptb.{part}.txt" in str(error.value)


def test_a_damaged_text(tmp_path, monkeypatch):
    declare(monkeypatch, "ptb", TEXTS)
    for part, content in TEXTS.items():
        write(tmp_path / "ptb" / f"ptb.{part}.txt.gz", content)
    path = tmp_path / "ptb" / "ptb.valid.txt.gz"
    path.write_bytes(gzip.compress(b" dog cat\n"))
    with pytest.raises(ValueError, match="is damaged") as error:
        data.text("ptb", tmp_path)
    assert_helpful(str(error.value), path, tmp_path, FILES["ptb"].parts["valid"])


def test_unknown_names(tmp_path):
    for read in (data.images, data.text):
        with pytest.raises(ValueError, match=r"name must be one of .*, got 'imagenet'"):
            read("imagenet", tmp_path)
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'ptb'"):
        data.synthetic_images("ptb")


def test_uci(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(308, 6)), np.arange(308.0)
    path = tmp_path / "uci" / "yacht.npz"
    with pytest.raises(FileNotFoundError, match=r"arrays X \(308, 6\) and y \(308,\).*no download"):
        data.uci("yacht", tmp_path)
    path.parent.mkdir()
    np.savez(path, X=x, y=y)
    for found, array in zip(data.uci("yacht", tmp_path), (x, y), strict=True):
        np.testing.assert_array_equal(found, array)
    path.write_bytes(flip(path.read_bytes(), 5000))
    with pytest.raises(ValueError, match="cannot be read"):
        data.uci("yacht", tmp_path)
    wrong = [
        ({"X": x}, "cannot be read"),
        ({"X": x, "y": np.array([{}])}, "cannot be read"),
        ({"X": x[1:], "y": y[1:]}, r"has X \(307, 6\)"),
        ({"X": x, "y": y[1:]}, r"y \(307,\)"),
        ({"X": x, "y": y * np.nan}, "not finite"),
    ]
    for content, message in wrong:
        np.savez(path, **content)
        with pytest.raises(ValueError, match=message):
            data.uci("yacht", tmp_path)
    np.savez(tmp_path / "uci" / "own.npz", X=x[:7], y=y[:7])
    assert data.uci("own", tmp_path)[0].shape == (7, 6)


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_a_split_has_every_example_once(count, valid, seed):
    if not 0 < round(count * valid) < count:
        with pytest.raises(ValueError, match="leave no example"):
            data.split(count, valid, seed, None)
        return
    state = torch.random.get_rng_state()
    train, held_out = data.split(count, valid, seed, None)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(held_out) == round(count * valid)
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(count))
    again = data.split(count, valid, seed, None)
    assert torch.equal(again[0], train)
    assert torch.equal(again[1], held_out)


def test_seeds_give_different_splits():
    assert not torch.equal(data.split(100, 0.2, 0, None)[1], data.split(100, 0.2, 1, None)[1])
    held_out = torch.stack([data.split(50, 0.2, seed, None)[1] for seed in range(400)])
    torch.testing.assert_close(held_out.flatten().bincount() / 400, torch.full((50,), 0.2), atol=0.08, rtol=0)


def test_a_split_is_saved_and_read_again(tmp_path):
    path = tmp_path / "runs" / "split.json"
    train, valid = data.split(20, 0.25, 3, path)
    assert torch.equal(data.split(20, 0.25, 3, None)[1], valid)
    assert [entry.name for entry in path.parent.iterdir()] == ["split.json"]
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved == {
        "count": 20,
        "fraction": 0.25,
        "seed": 3,
        "limit": None,
        "valid": valid.tolist(),
        "train": None,
    }
    other = train[:5].tolist()
    path.write_text(json.dumps(saved | {"valid": other}))
    train, valid = data.split(20, 0.25, 3, path)
    assert valid.tolist() == other
    assert sorted([*train.tolist(), *other]) == list(range(20))


@given(st.integers(2, 60), st.integers(1, 60), st.integers(0, 2**31))
def test_a_limit_leaves_some_of_the_examples_for_training(tmp_path_factory, count, limit, seed):
    """The same in every run, also if they are read from the file."""
    path = tmp_path_factory.mktemp("runs") / "split.json"
    train, valid = data.split(count, 0.5, seed)
    fewer, same = data.split(count, 0.5, seed, path, limit=limit)
    assert torch.equal(same, valid)
    assert len(fewer) == min(limit, len(train))
    assert set(fewer.tolist()) <= set(train.tolist())
    for again in (data.split(count, 0.5, seed, path, limit=limit), data.split(count, 0.5, seed, limit=limit)):
        assert torch.equal(again[0], fewer)
        assert torch.equal(again[1], valid)
    with pytest.raises(ValueError, match="holds the split for"):
        data.split(count, 0.5, seed, path, limit=limit + 1)


def test_a_limit_draws_at_random():
    kept = torch.cat([data.split(50, 0.2, seed, limit=10)[0] for seed in range(400)])
    torch.testing.assert_close(kept.bincount(minlength=50) / 400, torch.full((50,), 0.2), atol=0.08, rtol=0)


def test_another_saved_split_is_an_error(tmp_path):
    path = tmp_path / "split.json"
    data.split(20, 0.25, 3, path)
    for arguments in ((21, 0.25, 3), (20, 0.26, 3), (20, 0.25, 4)):
        with pytest.raises(ValueError, match=r"split\.json holds the split for .*choose another --out"):
            data.split(*arguments, path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    for rows in ([0, 1, 2, 3], [0, 1, 2, 3, 3], [0, 1, 2, 3, 20], [0, 1, 2, 3, -1], [0, 1, 2, 3, 4.0]):
        path.write_text(json.dumps(saved | {"valid": rows}))
        with pytest.raises(ValueError, match="should hold 15 indices for training and 5 others"):
            data.split(20, 0.25, 3, path)
    path.unlink()
    data.split(20, 0.25, 3, path, limit=4)
    saved = json.loads(path.read_text(encoding="utf-8"))
    inside = saved["valid"][0]
    for rows in (saved["train"][:3], [*saved["train"][:3], inside], [*saved["train"][:3], 20]):
        path.write_text(json.dumps(saved | {"train": rows}))
        with pytest.raises(ValueError, match="should hold 4 indices for training and 5 others"):
            data.split(20, 0.25, 3, path, limit=4)
    for content in ("", "[]", "{}", '{"count": 20'):
        path.write_text(content)
        with pytest.raises(ValueError, match="is not a saved split"):
            data.split(20, 0.25, 3, path)


@pytest.mark.parametrize("valid", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_outside_zero_and_one(valid):
    with pytest.raises(ValueError, match="valid must be a share"):
        data.split(10, valid, 0, None)


@pytest.mark.parametrize(
    ("name", "shape"), [("mnist", (1, 28, 28)), ("fashion_mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))]
)
def test_synthetic_images_can_be_learned(name, shape):
    """The nearest class mean finds most labels of new images, and not all."""
    images = data.synthetic_images(name, seed=1, train=300, test=200)
    assert images.train_x.shape == (300, *shape)
    assert images.test_x.shape == (200, *shape)
    assert images.train_x.dtype == torch.uint8
    assert images.test_y.dtype == torch.int64
    assert set(images.train_y.tolist()) == set(range(10))
    x, new = images.train_x.flatten(1).float(), images.test_x.flatten(1).float()
    means = torch.stack([x[images.train_y == label].mean(0) for label in range(10)])
    assert (torch.cdist(new, means).argmin(1) == images.test_y).float().mean() > 0.7
    again = data.synthetic_images(name, seed=1, train=300, test=200)
    assert torch.equal(again.test_x, images.test_x)
    assert not torch.equal(data.synthetic_images(name, seed=2, train=300, test=200).test_y, images.test_y)


def test_synthetic_text_is_a_markov_chain():
    text = data.synthetic_text(seed=1, words=30, train=20_000, valid=500, test=400)
    assert (len(text.train), len(text.valid), len(text.test), len(set(text.vocabulary))) == (20_000, 500, 400, 30)
    counts = torch.zeros(30, 30, dtype=torch.float64)
    counts.index_put_((text.train[:-1], text.train[1:]), torch.ones(()).double(), accumulate=True)
    assert ((counts > 0).sum(1) == 4).all()
    shares = (counts / counts.sum(1, keepdim=True)).sort(1, descending=True).values[:, :4].mean(0)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.15, 0.1]).double(), atol=0.02, rtol=0)
    assert (counts[text.test[:-1], text.test[1:]] > 0).all()
    assert torch.equal(data.synthetic_text(seed=1, words=30, valid=500, test=400).test, text.test)
    assert not torch.equal(data.synthetic_text(seed=2, words=30, valid=500, test=400).test, text.test)


@pytest.mark.parametrize("arguments", [{"words": 3}, {"train": 0}, {"valid": 0}, {"test": -1}])
def test_wrong_sizes_of_generated_data(arguments):
    with pytest.raises(ValueError, match="must be at least"):
        data.synthetic_text(**arguments)
    if "train" in arguments or "test" in arguments:
        with pytest.raises(ValueError, match="must be at least 1"):
            data.synthetic_images("mnist", **arguments)
