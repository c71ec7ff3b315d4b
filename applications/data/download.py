"""Download the official files: resumed where it stopped, checked before a file gets its name, unpacked safely."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path

from tqdm.auto import tqdm

from applications.data.files import FILES, UNPACKING_ERRORS, Files, hashed, is_packed, open_content, read_archive
from applications.data.sets import IMAGES, TEXTS, UCI_SOURCE

NAMES = (*IMAGES, *TEXTS)
TIMEOUT = 60.0  # seconds without a byte
BLOCK = 1 << 18


def download(name: str, root: Path, *, progress: bool = True) -> list[Path]:
    """Get the files of a data set that are missing or damaged where downloads go; a second call gets nothing.

    What has arrived of a file is kept beside it under the name ``*.part``, and the next call goes on from there.

    Args:
        name: Of the set, see ``NAMES``.
        root: The data folder; it is made if need be.
        progress: Whether to show a bar for each file.

    Returns:
        The files, where the readers find them.

    Raises:
        ValueError: If there is no set of this name, or what arrives is not what is expected.
    """
    root = Path(root)
    if name not in NAMES:
        remedy = f" {UCI_SOURCE}." if name == "uci" else ""
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}.{remedy}")
    files = FILES[name]
    paths = {part: files.target(part, root) for part in files.parts}
    if name != "cifar10":
        for part in paths:
            fetch(files, part, root, progress)
    elif wanted := [part for part, path in paths.items() if not is_whole(files, part, path)]:
        fetch(FILES["cifar10_archive"], "binary", root, progress)
        contents = read_archive("binary", root)
        for part in wanted:
            paths[part].parent.mkdir(parents=True, exist_ok=True)
            partial = part_of(paths[part])
            partial.write_bytes(contents[part])
            partial.replace(paths[part])
    return list(paths.values())


def part_of(path: Path) -> Path:
    """Where a file grows until it is whole."""
    return path.with_name(path.name + ".part")


def is_whole(files: Files, part: str, path: Path) -> bool:
    """Whether a file, or what has arrived of it, has the expected checksum."""
    return path.is_file() and checksum(files, part, path) == files.parts[part]


def checksum(files: Files, part: str, path: Path) -> str:
    """The checksum of a file that may still have another name, or why it has none."""
    try:
        with open_content(path, is_packed(Path(files.places[0]))) as file:
            return hashed(files.parts[part], file)
    except UNPACKING_ERRORS as error:
        return f"no content that can be unpacked ({error})"


def fetch(files: Files, part: str, root: Path, progress: bool) -> None:
    """Get one file, unless it is there.

    Raises:
        ValueError: If what arrives has another checksum.
        OSError: If the connection fails; what has arrived is kept.
    """
    path, url = files.target(part, root), files.url.format(part)
    partial = part_of(path)
    if is_whole(files, part, path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_whole(files, part, partial):
        try:
            receive(url, partial, progress)
        except (OSError, http.client.HTTPException) as error:
            raise OSError(
                f"{path} (expected: {files.expected(part)}) could not be downloaded from {url}: {error}. "
                f"What has arrived is kept; go on with: {files.command(root)}"
            ) from error
        found = checksum(files, part, partial)
        if found != files.parts[part]:
            partial.unlink()
            raise ValueError(
                f"{path} was not written: {url} sent {found}, and {files.expected(part)} is expected. "
                f"Try again with: {files.command(root)}"
            )
    partial.replace(path)


def receive(url: str, partial: Path, progress: bool) -> None:
    """Append to a file what is missing of it; start over if the server does not go on from there.

    Raises:
        ConnectionError: If the server stops before the end.
        HTTPError: If it refuses.
    """
    start = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": "bilevel", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416 or not start:
            raise
        # Nothing comes after the last byte we have, and yet it is not the right file.
        partial.unlink()
        receive(url, partial, progress)
        return
    with response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        start = start if goes_on else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        name = partial.name.removesuffix(".part")
        bar = tqdm(total=total, initial=start, desc=name, unit="B", unit_scale=True, disable=not progress)
        with partial.open("ab" if goes_on else "wb") as file, bar:
            while block := response.read(BLOCK):
                file.write(block)
                bar.update(len(block))
    size = partial.stat().st_size
    if total is not None and size < total:
        raise ConnectionError(f"the connection closed after {size} of {total} bytes")
