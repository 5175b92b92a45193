#!/usr/bin/env python3
"""Run ``leasekeeper worker run`` from an installed wheel: no dependency of the service, and no service.

    worker_smoke.py PATH_OF_LEASEKEEPER

The worker must load a module with typed payloads and a process handler, look for a coordinator, and end with
exit code 0 on SIGTERM; a command of the service must say what to install.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

LIMIT_SECONDS = 60.0
MODULE = """
from dataclasses import dataclass
from worker_sdk import ConnectionConfig, Context, ProcessContext, Worker

worker = Worker(ConnectionConfig.from_env(), queues=["q"])

@dataclass
class Mail:
    to: str

@worker.handler("send")
async def send(ctx: Context, mail: Mail) -> Mail:
    return mail

@worker.handler("crunch", pool="process")
def crunch(ctx: ProcessContext, numbers: list[int]) -> int:
    return sum(numbers)
"""


def main(command: str) -> None:
    """Run both; *command* is resolved here, for the worker has another folder.

    Raises:
        SystemExit: something is not as it should be.
    """
    command = os.path.abspath(command)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "smoke.py").write_text(MODULE)
        # Port 1 of this machine: nobody listens there.
        environment = {**os.environ, "LEASEKEEPER_ENDPOINTS": "127.0.0.1:1"}
        worker = subprocess.Popen(
            [command, "worker", "run", "smoke:worker", "--concurrency", "2", "--drain-timeout", "1"],
            cwd=folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        watchdog = threading.Timer(LIMIT_SECONDS, worker.kill)
        watchdog.start()
        assert worker.stderr is not None
        lines = []
        for line in worker.stderr:
            lines.append(line)
            if "no session yet" in line:
                worker.send_signal(signal.SIGTERM)
        code = worker.wait()
        watchdog.cancel()
        if code != 0:
            raise SystemExit(f"worker run ended with code {code}:\n{''.join(lines)}")
    serve = subprocess.run(
        [command, "serve"], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if serve.returncode != 2 or "pip install" not in serve.stderr:
        raise SystemExit(f"serve without the service: code {serve.returncode}, {serve.stderr}")
    print("leasekeeper worker run works without the service's dependencies")


if __name__ == "__main__":
    main(*sys.argv[1:])
