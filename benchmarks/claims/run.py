"""Common claims about batching, measured on this machine.

    python benchmarks/claims/run.py static|prefill|decode|fill|utilisation|costs
        [--device cpu|cuda] [--model MODEL] [--precision int8] [--load-format auto] [--scale 1.0]

Prints figures, not verdicts: docs/claims.md has those. --scale shortens what is played, to try
it out. Everything runs on the real engine in this process but the last table of `fill`, which
is in virtual time with the machine of docs/performance.md and says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import batch_claims
import step_claims
from claim_parts import Claim, loaded
from machine import describe

from hotbatch.options import EngineOptions

CLAIMS: dict[str, Claim] = {
    "static": batch_claims.static,
    "prefill": step_claims.prefill,
    "decode": step_claims.decode,
    "fill": batch_claims.fill,
    "utilisation": batch_claims.utilisation,
    "costs": batch_claims.costs,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("claim", choices=sorted(CLAIMS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    options = {
        "device": arguments.device,
        "precision": arguments.precision,
        "load_format": arguments.load_format,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
    }
    if arguments.model:
        options["model"] = arguments.model
    print(describe(claim=arguments.claim, scale=arguments.scale, device=arguments.device))
    claim = CLAIMS[arguments.claim]
    with loaded(EngineOptions(**options)) as machine:
        print(f"claim: {(claim.__doc__ or '').splitlines()[0]}\n")
        claim(machine, arguments.scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
