"""A server process over the simulated executor, for tests of signals and exit codes.

Usage: serve_simulated.py STEP_SECONDS GRACE_SECONDS [PORT]; prints its address when it is
ready.
"""

from __future__ import annotations

import sys
import time

from server_parts import make_rig

from hotbatch.server.run import ServerConfig, serve
from hotbatch.simulator import ConstantStepTime


def main() -> int:
    step_seconds, grace = float(sys.argv[1]), float(sys.argv[2])
    rig = make_rig(executor={"step_time": ConstantStepTime(step_seconds), "sleep": time.sleep})
    port = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    config = ServerConfig(port=port, shutdown_grace=grace)
    return serve(config, rig.service, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
