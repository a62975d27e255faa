"""The page's files, ready to be handed out by the server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}

INDEX = "index.html"
CONTENT_SECURITY_POLICY = "default-src 'none'; " + "; ".join(
    (
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
    )
)
"""The browser holds the page to it: nothing comes from elsewhere, nothing goes elsewhere."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; `tag` changes with its content, and is quoted as HTTP wants an ETag."""

    body: bytes
    media_type: str
    tag: str


@cache
def assets() -> Mapping[str, Asset]:
    """All files by their path below the page, such as `lanes.js`; read once (some 150 kB)."""
    return {
        path.relative_to(_PAGE).as_posix(): _asset(path)
        for path in sorted(_PAGE.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:16]
    return Asset(body, _MEDIA_TYPES[path.suffix], f'"{digest}"')
