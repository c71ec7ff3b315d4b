"""Data and run files that were made to harm: each ends in one error that names the file and the remedy."""

import gzip
import zipfile

import numpy as np
import pytest
import torch

from applications import run
from applications.data import files, sets, splits

DEEP = "[" * 100_000


def test_a_gz_bomb_is_not_unpacked(tmp_path):
    (tmp_path / "mnist").mkdir()
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(files.LARGEST // 2**20 + 1):
            file.write(bytes(2**20))
    with pytest.raises(ValueError, match=r"train-images.*more than \d+ bytes.*download mnist"):
        sets.images("mnist", tmp_path)


@pytest.mark.parametrize("shape", ["(99999999999999, 9)", "(9999999, 9999999)", "(-1, 2)", "(" * 3000, "(1,", "x.y"])
def test_npz_headers_that_lie(tmp_path, shape):
    (tmp_path / "uci").mkdir()
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(118) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(tmp_path / "uci" / "mine.npz", "w") as file:
        file.writestr("X.npy", content)
        file.writestr("y.npy", content)
    with pytest.raises(ValueError, match=r"mine\.npz cannot be read"):
        sets.uci("mine", tmp_path)


def test_an_npz_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "LARGEST", 10_000)
    (tmp_path / "uci").mkdir()
    np.savez_compressed(tmp_path / "uci" / "mine.npz", X=np.zeros((1000, 9)), y=np.zeros(1000))
    with pytest.raises(ValueError, match="claims to unpack to more"):
        sets.uci("mine", tmp_path)


@pytest.mark.parametrize("content", [DEEP, "", "[1]", "{", "\ud800".encode("utf-8", "surrogatepass").decode("latin1")])
def test_json_that_is_damaged(tmp_path, content, capsys):
    for name in ("settings.json", "environment.json", "summary.json"):
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*--out"):
        run.claim(tmp_path, {"task": "mnist"})
    assert run.finished(tmp_path, {"task": "mnist"}, []) is None
    run.note_environment(tmp_path / "environment.json", torch.device("cpu"))
    assert "written anew" in capsys.readouterr().out
    assert run.read_json(tmp_path / "environment.json")["device"] == "cpu"
    (tmp_path / "split.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"split\.json is not a saved split.*delete it"):
        splits.split(10, 0.5, 0, tmp_path / "split.json")


@pytest.mark.parametrize("content", ["{}", '{"settings": []}', '{"settings": {"epochs": null}}'])
def test_settings_of_another_version(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=r"settings\.json has no number of epochs.*--out"):
        run.prolong(tmp_path, {"settings": {"epochs": 3}}, 1.0)
