"""Writes hotbatch.json, the Grafana dashboard: python docs/grafana/make_dashboard.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = 'model_name=~"$model"'
DECODES = f'{MODEL},phase=~"decode|mixed"'
MISSED = ',outcome="missed"'
UTILISATION = (
    f"sum(rate(hotbatch:phase_ideal_seconds_total{{{DECODES}}}[$__rate_interval]))"
    f" / sum(rate(hotbatch:phase_busy_seconds_total{{{DECODES}}}[$__rate_interval]))"
)


def rate(name: str, by: str = "", extra: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate(hotbatch:{name}{{{MODEL}{extra}}}[$__rate_interval]))"


def quantile(name: str, share: float) -> str:
    return (
        f"histogram_quantile({share}, sum by (le) "
        f"(rate(hotbatch:{name}_bucket{{{MODEL}}}[$__rate_interval])))"
    )


def value(name: str) -> str:
    return f"hotbatch:{name}{{{MODEL}}}"


# (title, unit, stacked?, width of 24, [(query, legend)])
PANELS: list[tuple[str, str, bool, int, list[tuple[str, str]]]] = [
    (
        "Decode utilisation against the measured ceiling (aim: 70 %)",
        "percentunit",
        False,
        12,
        [(UTILISATION, "decode utilisation"), ("vector(0.7)", "70 %")],
    ),
    (
        "Where the time goes",
        "percentunit",
        True,
        12,
        [(f"{rate('time_seconds_total', 'cause')}", "{{cause}}")],
    ),
    (
        "Memory bandwidth and compute in use, by kind of step",
        "percentunit",
        False,
        12,
        [
            (value("mbu_ratio"), "bandwidth, {{phase}}"),
            (value("mfu_ratio"), "compute, {{phase}}"),
        ],
    ),
    (
        "Rows of steps",
        "short",
        False,
        12,
        [
            (value("decode_rows"), "sequences that decode"),
            (value("knee_tokens"), "knee: below it, one more is free"),
        ],
    ),
    (
        "Tokens per second",
        "short",
        False,
        12,
        [
            (rate("generation_tokens_total"), "generated"),
            (rate("prompt_tokens_computed_total"), "of prompts, computed"),
            (rate("prompt_tokens_cached_total"), "of prompts, from the cache"),
        ],
    ),
    (
        "Computed for nothing",
        "short",
        False,
        12,
        [
            (rate("step_tokens_total", extra=',kind="rejected"'), "refused drafts per second"),
            (rate("step_tokens_total", extra=',kind="recomputed"'), "recomputed tokens per second"),
        ],
    ),
    (
        "Requests",
        "short",
        False,
        12,
        [
            (value("num_requests_running"), "running"),
            (value("requests_waiting"), "waiting, {{class}}"),
            (value("requests_paused"), "paused"),
        ],
    ),
    (
        "KV cache in use",
        "percentunit",
        False,
        12,
        [(value("kv_cache_usage_perc"), "blocks in use")],
    ),
    (
        "Time to the first token",
        "s",
        False,
        12,
        [(quantile("time_to_first_token_seconds", q), f"p{q * 100:.0f}") for q in (0.5, 0.95)],
    ),
    (
        "Time between tokens",
        "s",
        False,
        12,
        [(quantile("inter_token_latency_seconds", q), f"p{q * 100:.0f}") for q in (0.5, 0.95)],
    ),
    (
        "Latency targets missed, share",
        "percentunit",
        False,
        12,
        [
            (
                f"{rate('targets_total', 'class, target', MISSED)}"
                f" / {rate('targets_total', 'class, target')}",
                "{{class}}, {{target}}",
            )
        ],
    ),
    (
        "Refused, requests per second",
        "short",
        False,
        12,
        [(rate("requests_refused_total", "reason"), "{{reason}}")],
    ),
]


def panel(number: int, entry: tuple[str, str, bool, int, list[tuple[str, str]]]) -> dict[str, Any]:
    title, unit, is_stacked, width, queries = entry
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"h": 8, "w": width, "x": number % 2 * 12, "y": number // 2 * 8},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 60 if is_stacked else 10,
                    "stacking": {"mode": "normal" if is_stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(65 + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    return {
        "title": "hotbatch",
        "uid": "hotbatch",
        "schemaVersion": 39,
        "tags": ["hotbatch", "llm"],
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${source}"},
                    "query": "label_values(hotbatch:num_requests_running, model_name)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": [panel(number, entry) for number, entry in enumerate(PANELS)],
    }


if __name__ == "__main__":
    path = Path(__file__).with_name("hotbatch.json")
    path.write_text(json.dumps(dashboard(), indent=2) + "\n")
