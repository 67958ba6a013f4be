"""What the gate costs over HTTP: a model that does nothing behind vramgate, plain FastAPI and LitServe.

`python benchmarks/overhead.py [--seconds 6] [--rounds 3]`, with `wrk` on PATH and `litserve` installed (left
out where it is not). They serve on this machine in turn, each with one worker; the ledger, the agent and the
load share its cores with the gateway. What may be quoted are the ratios of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from scheduler.embedded import free_port

PLAIN = """
import fastapi, pydantic
class Inputs(pydantic.BaseModel):
    text: str
class Body(pydantic.BaseModel):
    inputs: Inputs
app = fastapi.FastAPI()
@app.post("/v1/models/noop/infer")
async def infer(body: Body):
    return {"outputs": {"text": body.inputs.text}}
@app.get("/readyz")
async def ready():
    return {}
"""
LITSERVE = """
import sys
import litserve
class Noop(litserve.LitAPI):
    def setup(self, device): pass
    def decode_request(self, request): return request["inputs"]["text"]
    def predict(self, text): return text
    def encode_response(self, text): return {"outputs": {"text": text}}
if __name__ == "__main__":
    api = Noop(api_path="/v1/models/noop/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    options = {"num_api_servers": 1, "log_level": "warning", "generate_client_file": False}
    server.run(host="127.0.0.1", port=int(sys.argv[1]), **options)
"""
MODEL = """
import pydantic, vramgate
class Words(pydantic.BaseModel):
    text: str
class Noop(vramgate.Model):
    input_schema = Words
    max_batch = 64
    def load(self, ctx): pass
    def predict(self, batch, ctx): return [{"text": item.text} for item in batch]
    def sample(self, units): return Words(text="a")
"""
CONFIG = '[models.noop]\nentrypoint = "noop:Noop"\n'
REQUEST = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"inputs": {"text": "hello"}}'
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests per second, median latency in ms, and answers other than 2xx."""

    rate: float
    median_ms: float
    refused: int


def measure(port: int, folder: Path, *, clients: int, seconds: int) -> Figures:
    url = f"http://127.0.0.1:{port}/v1/models/noop/infer"
    command = [
        "wrk",
        "-t1",
        f"-c{clients}",
        f"-d{seconds}s",
        "--latency",
        "-s",
        str(folder / "request.lua"),
        url,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    median = re.search(r"50%\s+([\d.]+)(us|ms|s)", said)
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
    if rate is None or median is None:
        raise SystemExit(f"wrk said something else than expected:\n{said}")
    factor = {"us": 0.001, "ms": 1.0, "s": 1000.0}[median[2]]
    return Figures(float(rate[1]), float(median[1]) * factor, int(refused[1]) if refused else 0)


@contextlib.contextmanager
def serving(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """The service while it is ready; ended in order afterwards."""
    with (folder / "service.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 90
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    body = {"inputs": {"text": "x"}}
                    answer = httpx.post(f"http://127.0.0.1:{port}/v1/models/noop/infer", json=body, timeout=5)
                    if answer.status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(
                        f"{command[:4]} did not come up:\n{(folder / 'service.log').read_text()[-2000:]}"
                    )
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, _ = parser.parse_known_args()
    if shutil.which("wrk") is None:
        raise SystemExit("benchmarks/overhead.py needs wrk on PATH (Debian: apt-get install wrk)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (
            ("plain.py", PLAIN),
            ("lit.py", LITSERVE),
            ("noop.py", MODEL),
            ("vramgate.toml", CONFIG),
            ("request.lua", REQUEST),
        ):
            (folder / file).write_text(text)
        ports = {kind: free_port() for kind in ("plain", "litserve", "vramgate")}
        commands = {
            "plain": [
                sys.executable,
                "-m",
                "uvicorn",
                "plain:app",
                "--port",
                str(ports["plain"]),
                "--no-access-log",
            ],
            "litserve": [sys.executable, "lit.py", str(ports["litserve"])],
            "vramgate": [
                *(sys.executable, "-P", "-m", "vramgate.cli.main", "up", "--config", "vramgate.toml"),
                *("--simulate", "1x512MiB", "--port", str(ports["vramgate"])),
            ],
        }
        if importlib.util.find_spec("litserve") is None:
            print("litserve is not installed: measured without it")
            del commands["litserve"]
        found: dict[tuple[str, int], list[Figures]] = {}
        for _ in range(arguments.rounds):
            for kind, command in commands.items():
                with serving(command, folder, ports[kind]):
                    for clients in (64, 1):
                        figures = measure(ports[kind], folder, clients=clients, seconds=arguments.seconds)
                        found.setdefault((kind, clients), []).append(figures)
    report = {
        f"{kind}, {clients} clients": {
            "requests_per_s": [round(figures.rate) for figures in runs],
            "median_ms": [round(figures.median_ms, 2) for figures in runs],
            "refused": sum(figures.refused for figures in runs),
        }
        for (kind, clients), runs in found.items()
    }
    print(json.dumps(report, indent=1))

    def middle(kind: str, clients: int, what: str) -> float:
        return float(statistics.median(getattr(figures, what) for figures in found[kind, clients]))

    share = middle("vramgate", 64, "rate") / middle("plain", 64, "rate")
    added = middle("vramgate", 1, "median_ms") - middle("plain", 1, "median_ms")
    print(f"medians of {arguments.rounds} rounds")
    print(f"throughput at 64 clients: {share:.2f} of plain FastAPI's")
    print(f"latency with one in flight: {added:.2f} ms more than plain FastAPI's")
    if "litserve" in commands:
        share = middle("vramgate", 64, "rate") / middle("litserve", 64, "rate")
        times = middle("vramgate", 1, "median_ms") / middle("litserve", 1, "median_ms")
        print(f"beside LitServe: {share:.2f} of its throughput at 64 clients, {times:.1f} x its latency")


if __name__ == "__main__":
    main()
