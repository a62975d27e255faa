"""Fetching a model from the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotbatch.core.errors import ModelLoadError

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all)."""

WANTED_FILES = ["*.json", "*.jinja", "model*.safetensors", "tokenizer*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str) -> bool:
    """Whether `source` reads as "owner/name"."""
    return _HUB_ID.fullmatch(source) is not None and not source.endswith(".gguf")


def fetch(hub_id: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The folder of the model in the hub's cache, downloaded where it is not there yet.

    Raises:
        ModelLoadError: there is no such model, access is refused, or the hub cannot be reached
            and the cache does not have it.
    """
    # Imported late: it takes longer than loading a small model, and local ones do without.
    import huggingface_hub

    options: dict[str, Any] = {"revision": revision, "allow_patterns": WANTED_FILES}
    if progress is not None:
        options["tqdm_class"] = _reporting_to(progress)
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, **options))
    except Exception as error:  # the client raises its own, its HTTP library's and OS errors
        raise ModelLoadError(_explain(hub_id, error), param="model") from error


def _explain(hub_id: str, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"The model {hub_id} asks you to accept its terms: do so on its page, then set "
            "HF_TOKEN to a token of that account."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The model {hub_id} has no such revision. Check --revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The hub has no model {hub_id}, or it is private. Check the name, or set HF_TOKEN. "
            "For a local model, give the path of its folder or GGUF file."
        )
    return (
        f"The model {hub_id} is not on this machine and could not be fetched from the hub "
        f"({type(error).__name__}: {error}). Check the network, or give the path of a model "
        "folder or GGUF file."
    )


def _reporting_to(progress: Progress) -> type:
    """A progress bar class for the client that draws nothing and reports the bytes of all
    files together. Bars that count files, not bytes, are left out."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    lock = threading.Lock()
    done: dict[int, tuple[int, int]] = {}

    class ReportingBar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            kwargs["disable"] = False
            kwargs["file"] = _Nowhere()
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self._counts_bytes:
                with lock:
                    done[id(self)] = (int(self.n), int(self.total or self.n))
                    progress(sum(n for n, _ in done.values()), sum(t for _, t in done.values()))
            return drawn

    return ReportingBar


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
