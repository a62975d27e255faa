"""What the texts of the command line mean; complaints name the option."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

from hotbatch.bench.load import Phase
from hotbatch.bench.report import METRICS
from hotbatch.bench.workload import Group

# What OpenAI's `service_tier` calls the classes.
TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
_MEASURES = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str], option: str = "--goodput") -> dict[str, float]:
    """["ttft:500 tpot:50"] or ["ttft:500", "tpot:50"] to {"ttft": 500.0, "tpot": 50.0}."""
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        name, _, value = pair.partition(":")
        limit = _number(value)
        if name not in _MEASURES or limit is None or not limit >= 0.0:
            raise typer.BadParameter(f"{option} takes ttft:MS, tpot:MS or e2el:MS, got {pair!r}")
        limits[name] = limit
    return limits


def parse_classes(mix: str | None, slos: Sequence[str], *, send_slo: bool = True) -> list[Group]:
    """ "interactive=0.3,batch=0.7" and ["interactive=ttft:500,tpot:50"] to groups."""
    limits = {}
    for slo in slos:
        name, equals, text = slo.partition("=")
        if not equals or name not in TIERS:
            raise typer.BadParameter(
                f"--class-slo takes CLASS=ttft:MS,tpot:MS with one of {', '.join(TIERS)}, "
                f"got {slo!r}"
            )
        limits[name] = parse_goodput([text], "--class-slo")
    shares = parse_shares(mix, "--class-mix")
    for name in (*shares, *limits):
        if name not in TIERS:
            raise typer.BadParameter(f"--class-mix knows {', '.join(TIERS)}, not {name!r}")
        if name not in shares:
            raise typer.BadParameter(f"--class-slo names {name!r}, which --class-mix does not")
    groups = []
    for name, share in shares.items():
        fields: dict[str, Any] = {"service_tier": TIERS[name]}
        promised = {
            f"{measure}_ms": limit
            for measure, limit in limits.get(name, {}).items()
            if measure != "e2el"
        }
        if promised and send_slo:
            fields["slo"] = promised
        groups.append(Group(name, share, fields, limits.get(name)))
    return groups


def parse_tenants(mix: str | None, keys: Sequence[str]) -> list[Group]:
    """ "a=10,b=1" and ["a=KEY"] to groups; who has no key sends its name as `user`."""
    shares = parse_shares(mix, "--tenant-mix")
    known = parse_pairs(keys, "--tenant-key")
    for name in known:
        if name not in shares:
            raise typer.BadParameter(f"--tenant-key names {name!r}, which --tenant-mix does not")
    return [
        Group(name, share, {} if name in known else {"user": name}, api_key=known.get(name))
        for name, share in shares.items()
    ]


def parse_shares(text: str | None, option: str) -> dict[str, float]:
    """ "a=0.3,b=0.7" to shares, which need not sum to 1."""
    shares: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.partition("=")
        share = _number(value)
        if not name or share is None or not 0.0 < share < float("inf"):
            raise typer.BadParameter(f"{option} takes NAME=SHARE,..., got {part!r}")
        shares[name.strip()] = share
    return shares


def parse_phases(clients: str | None, seconds: str) -> list[Phase]:
    """ "5-100-5" and "10-20-10" (or one number for all) to phases."""
    if clients is None:
        return []
    counts = [_number(part) for part in clients.split("-")]
    spans = [_number(part) for part in seconds.split("-")]
    if len(spans) == 1:
        spans *= len(counts)
    if len(spans) != len(counts):
        raise typer.BadParameter(f"--burst-seconds has {len(spans)} parts, --burst {len(counts)}")
    phases = []
    for count, span in zip(counts, spans, strict=True):
        if count is None or count < 0 or count != int(count):
            raise typer.BadParameter(f"--burst takes numbers of clients: 5-100-5, got {clients!r}")
        if span is None or not span > 0.0:
            raise typer.BadParameter(f"--burst-seconds takes seconds: 10-20-10, got {seconds!r}")
        phases.append(Phase(int(count), span))
    if not any(phase.clients for phase in phases):
        raise typer.BadParameter(f"--burst needs at least one client, got {clients!r}")
    return phases


def parse_json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter("--extra-body must be a JSON object")
    return value


def parse_percentiles(text: str) -> list[float]:
    values = [_number(part) for part in text.split(",")]
    numbers = [value for value in values if value is not None and 0.0 <= value <= 100.0]
    if not values or len(numbers) != len(values):
        raise typer.BadParameter(f"--metric-percentiles takes numbers from 0 to 100, got {text!r}")
    return numbers


def parse_metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS and name != "client_queue_time":
            raise typer.BadParameter(f"--percentile-metrics: unknown {name!r}; know {METRICS}")
    return names


def parse_pairs(items: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option} takes NAME=VALUE, got {item!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def parse_token_range(bounds: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= bounds[0] < bounds[1]:
        raise typer.BadParameter(f"--token-range needs 0 <= lowest < highest, got {bounds}")
    return bounds


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
