"""Six real servers, five of them in trouble: does `hotbatch doctor` name the cause?

    python benchmarks/doctor/situations.py [few-clients tiny-cache slow-host prompts
        wrong-guesses healthy] [--seconds 8] [--json found.json]

Each is a `hotbatch serve` of its own with the embedded model, loaded by `hotbatch bench serve` and
watched over HTTP as a person would. Two have a trouble that no option makes (troubled_server.py).
`healthy` has as many clients as fill the batch; where the kernels are below 70 % of the ceiling,
doctor says that the rest is lost there, and that the batch is as full as it needs to be.

tests/doctor has the same and more in virtual time. Exits with 1 if a cause is another one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import describe

from hotbatch.bench.server_process import SERVE, serving
from hotbatch.doctor import judge, make_window
from hotbatch.doctor.report import as_json, as_text
from hotbatch.doctor.watch import watch

_SETTLE = 3.0  # seconds until the load is what it will be


@dataclass(frozen=True, slots=True)
class Situation:
    """A server and its clients, each of which asks for `output` tokens after `prompt` random ones
    again and again.

    `causes` are the right answers, `lever` is part of what to do.
    """

    causes: tuple[str, ...]
    lever: str
    clients: int
    prompt: int
    output: int
    options: Sequence[str] = ()
    trouble: str = ""

    @property
    def command(self) -> Sequence[str]:
        if not self.trouble:
            return SERVE
        script = Path(__file__).with_name("troubled_server.py")
        return (sys.executable, str(script), self.trouble, "serve")


SITUATIONS = {
    "few-clients": Situation(("few_clients",), "concurrency", 2, 32, 128),
    "tiny-cache": Situation(
        ("kv_cache",),
        "--kv-cache-memory-bytes",
        32, 64, 192,
        ("--kv-cache-memory-bytes", "40M", "--no-speculate"),
    ),
    "slow-host": Situation(("host",), "CPU", 32, 32, 128, trouble="slow-host"),
    "prompts": Situation(("prompts",), "prefix cache", 12, 900, 4),
    "wrong-guesses": Situation(
        ("speculation",), "speculation off", 16, 32, 128, trouble="wrong-guesses"
    ),
    "healthy": Situation(("healthy", "kernels"), "", 64, 16, 192),
}  # fmt: skip


def load(url: str, situation: Situation) -> subprocess.Popen[bytes]:
    """Clients that ask until they are ended."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "hotbatch.cli", "bench", "serve", "--base-url", url,
            "--num-prompts", "5000", "--max-concurrency", str(situation.clients),
            "--random-input-len", str(situation.prompt),
            "--random-output-len", str(situation.output), "--disable-tqdm",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("situations", nargs="*", help=", ".join(SITUATIONS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of watching each")
    parser.add_argument("--json", type=Path, help="keep what was seen")
    options = parser.parse_args(argv)
    print(describe(seconds=options.seconds))
    seen, wrong = {}, 0
    for name in options.situations or SITUATIONS:
        situation = SITUATIONS[name]
        with serving(("--precision", "int8", *situation.options), command=situation.command) as url:
            clients = load(url, situation)
            try:
                time.sleep(_SETTLE)
                window = make_window(watch(url, options.seconds))
                if clients.poll() is not None:  # it has said why
                    raise SystemExit(f"{name}: the clients ended, so there was nothing to watch")
            finally:
                clients.terminate()
                clients.wait()
        verdict = judge(window)
        levers = " ".join(finding.lever for finding in verdict.findings[:1])
        is_right = verdict.cause in situation.causes and situation.lever in levers
        wrong += not is_right
        print(f"\n== {name}: {'right' if is_right else 'WRONG'}\n{as_text(verdict, window)}")
        sys.stdout.flush()
        seen[name] = json.loads(as_json(verdict, window))
    if options.json:
        options.json.write_text(json.dumps(seen), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
