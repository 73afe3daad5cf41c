import os
import signal
import subprocess
import sys

SCRIPT = """
import asyncio, sys
from benchmarks.services import address_of

SERVICE = "import os, time; print(f'{os.getpid()} listening on 127.0.0.1:1', flush=True); time.sleep(60)"

async def main():
    async with address_of(sys.executable, "-c", SERVICE) as first, address_of(sys.executable, "-c", SERVICE) as second:
        print(first, second, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def test_a_benchmark_that_is_ended_ends_its_services():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout.readline() == "127.0.0.1:1 127.0.0.1:1\n"
        services = children_of(benchmark.pid)
        assert len(services) == 2
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(30) == 128 + signal.SIGTERM
    assert not any(os.path.exists(f"/proc/{service}") for service in services)
