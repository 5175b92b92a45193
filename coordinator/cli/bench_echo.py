"""The fastest that a unary call can be here: an empty grpc.aio server in a process of its own.

``python -m coordinator.cli.bench_echo`` serves until its standard input ends, and prints the port first.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import uvloop

from coordinator.cli.bench_numbers import Measured

__all__ = ["echo_round", "echo_server"]

_METHOD = "/leasekeeper.bench.Echo/Call"
_CALL_SECONDS = 10.0
_START_SECONDS = 15.0


async def _answer(request: bytes, context: object) -> bytes:
    return request


async def _serve() -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("leasekeeper.bench.Echo", {"Call": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    # The parent's end, however it comes, closes the pipe.
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace=0)


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """Run the echo server as a child process, and give its address; blocking.

    Raises:
        TimeoutError: it did not start.
    """
    # Not asyncio's subprocess: uvloop forks, and gRPC's handlers complain of forks.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        if child.stdout is None or child.stdin is None:
            raise RuntimeError("the child has no pipes")
        if not select.select([child.stdout], [], [], _START_SECONDS)[0]:
            raise TimeoutError(f"the echo server did not start within {_START_SECONDS} s")
        yield f"127.0.0.1:{int(child.stdout.readline())}"
        child.stdin.close()
        child.wait(_CALL_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


async def echo_round(address: str, calls: int, callers: int = 64) -> Measured:
    """Let ``callers`` send ``calls`` empty calls in all, each one after the other."""
    latencies: list[float] = []
    numbers = iter(range(calls))

    async def caller(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        for _ in numbers:
            sent = time.perf_counter()
            await call(b"", timeout=_CALL_SECONDS)
            latencies.append(time.perf_counter() - sent)

    async with grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
        await call(b"", timeout=_CALL_SECONDS, wait_for_ready=True)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(caller(call))
        seconds = time.perf_counter() - start
    return Measured(count=len(latencies), seconds=seconds, latencies=latencies)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
