"""The study's text, by package: Python files and documentation, installed here or in sdists.

Code is that of the installed packages. Prose is documentation that Debian and Python packages ship,
and that of sdists. Mixed is half documentation, half code, of other sdists: code refers to what
its documentation explains. Licenses are left out.
"""

import gzip
import hashlib
import os
import re
import site
import sys
import sysconfig
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from scripts.study.download import fetch
from titan_sparse.data.sources import NOT_STDLIB

Packages = dict[str, list[str]]
"""The texts of each package, in order."""


class Sdist(NamedTuple):
    """A source distribution of PyPI, chosen for its documentation."""

    file: str
    sha256: str
    kind: str
    is_held_out: bool

    @property
    def name(self) -> str:
        """Of the package."""
        return self.file.rpartition("-")[0]

    @property
    def requirement(self) -> str:
        """As pip takes it: name==version."""
        return self.file.removesuffix(".tar.gz").replace(f"{self.name}-", f"{self.name}==")


SDISTS = (
    Sdist(
        "django-5.2.19.tar.gz",
        "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
        "prose",
        is_held_out=False,
    ),
    Sdist(
        "salt-3008.5.tar.gz",
        "0259deafd601d783721e5aa8ed10677d8c4d6cc12f5de17499af71590d593315",
        "prose",
        is_held_out=False,
    ),
    Sdist(
        "celery-5.7.0.tar.gz",
        "6a5dfcf6662287204f009a02002b9e66c83d4105e47ebabdc7079108772fc6f0",
        "prose",
        is_held_out=True,
    ),
    Sdist(
        "docutils-0.23.tar.gz",
        "746f5060322511280a1e50eb76846ed6bf2342984b2ac04dc42caa1a8d78799e",
        "prose",
        is_held_out=True,
    ),
    Sdist(
        "sqlalchemy-2.1.9.tar.gz",
        "d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28",
        "mixed",
        is_held_out=False,
    ),
    Sdist(
        "sympy-1.14.0.tar.gz",
        "d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517",
        "mixed",
        is_held_out=False,
    ),
    Sdist(
        "twisted-26.10.0.tar.gz",
        "5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de",
        "mixed",
        is_held_out=False,
    ),
    Sdist(
        "networkx-3.6.1.tar.gz",
        "26b7c357accc0c8cde558ad486283728b65b6a95d85ee1cd66bafab4c8168509",
        "mixed",
        is_held_out=True,
    ),
    Sdist(
        "sphinx-9.0.4.tar.gz",
        "594ef59d042972abbc581d8baa577404abe4e6c3b04ef61bd7fc2acbd51f3fa3",
        "mixed",
        is_held_out=True,
    ),
)
_DEBIAN_DOCS = Path("/usr/share/doc")
_LEFT_OUT = re.compile(
    r"licen[cs]e|copying|copyright|authors|changelog|relnotes|status\.txt|unicover", re.IGNORECASE
)
"""Files that are no text to learn from."""
_DOCUMENTATION = (".rst", ".md", ".txt")


def installed_code(most_characters: int) -> Packages:
    """Texts of the Python files installed on this machine, by top-level package.

    Each is headed by its name. Files are in the order of their names, up to `most_characters` of a
    package. Exact copies of a file come once. What `SDISTS` have is left out.
    """
    packages: Packages = defaultdict(list)
    characters: Counter[str] = Counter()
    seen = set()
    in_sdists = {sdist.name for sdist in SDISTS}
    for name, path in sorted(_python_files()):
        package = name.partition("/")[0] if "/" in name else "modules"
        if package in in_sdists or characters[package] + path.stat().st_size > most_characters:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or not content.strip():
            continue
        seen.add(digest)
        packages[package].append(_headed(name, content))
        characters[package] += len(content)
    return dict(packages)


def _python_files() -> Iterator[tuple[str, Path]]:
    """(name below its root, path); the standard library, and what is installed beside it."""
    for root in _installed_roots():
        for folder, folders, files in os.walk(root):
            # In place: os.walk goes on by this list. Packages below the standard library have a
            # root of their own.
            folders[:] = [
                name for name in folders if name not in NOT_STDLIB and name != "__pycache__"
            ]
            for name in files:
                path = Path(folder, name)
                if name.endswith(".py") and path.is_file():
                    yield path.relative_to(root).as_posix(), path


def _installed_roots() -> list[Path]:
    names = ("stdlib", "purelib", "platlib")
    paths = [*map(sysconfig.get_path, names), *site.getsitepackages()]
    # Folders that a .pth file adds are installed packages too.
    paths += [path for path in sys.path if Path(path).name in NOT_STDLIB]
    return sorted({Path(path).resolve() for path in paths})


def installed_prose(most_characters: int) -> Packages:
    """Documentation that Python packages and Debian's packages ship here.

    Small packages are joined: all descriptions of Python packages are one package, all of Debian's
    another. Up to `most_characters` are taken from each folder.
    """
    packages: Packages = {"descriptions": [], "debian": []}
    for root in _installed_roots():
        metadata = sorted(root.glob("*.dist-info/METADATA"))
        for path in metadata:
            # After the headers, the long description.
            _, _, description = path.read_bytes().partition(b"\n\n")
            packages["descriptions"].append(_headed(path.parent.name, description))
    folders = sorted(_DEBIAN_DOCS.iterdir()) if _DEBIAN_DOCS.is_dir() else []
    for folder in folders:
        left = most_characters
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.is_symlink() or not _is_documentation(path):
                continue
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            if len(content) <= left:
                left -= len(content)
                name = path.relative_to(_DEBIAN_DOCS).as_posix()
                packages["debian"].append(_headed(name, content))
    return {name: texts for name, texts in packages.items() if texts}


def _is_documentation(path: Path | PurePosixPath) -> bool:
    name = path.name.removesuffix(".gz")
    return name.endswith(_DOCUMENTATION) and not _LEFT_OUT.search(path.as_posix())


def _headed(name: str, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace").replace("\0", "")
    return f"# {name}\n{text}\n"


def fetch_sdist(sdist: Sdist, cache: Path) -> Path:
    """The file of an sdist in the folder `cache`, by pip unless it is there.

    Raises ValueError, one line, without a network, and for a file that is not the known one.
    """
    path = cache / sdist.file
    fetch(sdist.requirement, path, sdist.sha256, "--no-binary", sdist.name)
    return path


def sdist_texts(path: Path, kind: str) -> list[str]:
    """Texts of an sdist: its documentation, and for the kind mixed as many characters of code.

    Code comes between documentation at equal shares, both in the order of their names.
    """
    prose, code = [], []
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        for member in members:
            # Without the folder of the archive, which has the version in its name.
            name = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or "tests" in name.parts:
                continue
            if _is_documentation(name) and name.parts[0] in ("doc", "docs"):
                prose.append(_headed(name.as_posix(), archive.extractfile(member).read()))
            elif kind == "mixed" and name.suffix == ".py":
                code.append(_headed(name.as_posix(), archive.extractfile(member).read()))
    return prose if kind == "prose" else interleave(prose, code)


def interleave(first: list[str], second: list[str]) -> list[str]:
    """Texts of two lists in turns, so that both have as many characters at each place.

    Ends where one of them does.
    """
    mixed: list[str] = []
    lead = 0  # characters of `first` that `second` is behind
    left, right = iter(first), iter(second)
    while (text := next(left if lead <= 0 else right, None)) is not None:
        mixed.append(text)
        lead += len(text) if lead <= 0 else -len(text)
    return mixed
