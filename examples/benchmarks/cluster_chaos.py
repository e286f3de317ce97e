"""Train through a spot market: nodes vanish, are told to leave, and join, by a recorded trace of availability and by seed.

Every node is a torchrun agent with one rank of ``train_cluster.py`` and a disk of its own, on this machine. After each change of
the trace, scaled down in count, a node is killed (SIGKILL, its disk is lost), told to leave (SIGTERM), or started, once training
has gone on for a few steps since the change before. The store of the rendezvous is this process's, as on a machine that stays.

At the end the weights are compared with those of a run that nobody disturbed, and the JSON file has:

    events                  changes that were made
    steps                   of the whole job
    max_weight_difference   from the undisturbed run, fp64
    lost_saved_steps        steps that were reported as saved in the cloud and trained again
    cloud_bytes_read, cloud_bytes_needed   that restores read there, and that no surviving disk had
    recovery_s              by event: from the change to the next finished step, and its parts

    python examples/benchmarks/cluster_chaos.py --trace examples/benchmarks/measured/availability.json --seed 1 --json chaos.json
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from results import environment
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

EXAMPLES = Path(__file__).parents[1]
STEP_LIMIT_S = 300.0


@dataclass(slots=True)
class Agent:
    """A node: torchrun's agent, its ranks, and its disk."""

    name: str
    process: subprocess.Popen[bytes]
    disk: Path

    def ranks(self) -> list[int]:
        """Processes that the agent started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[1]) == self.process.pid:
                    found.append(int(entry.name))
        return found


@dataclass(slots=True)
class Market:
    """All nodes of the run."""

    folder: Path
    arguments: argparse.Namespace
    port: int
    agents: list[Agent] = field(default_factory=list)
    started: int = 0

    def start(self) -> str:
        """A new node, with an empty disk."""
        name = f"node-{self.started}"
        self.started += 1
        disk = self.folder / name
        log = (self.folder / f"{name}.txt").open("wb")
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", f"1:{self.arguments.nodes}", "--nproc-per-node", "1", "--max-restarts", "1000"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "chaos"),
            *(
                "--rdzv-conf",
                "is_host=0,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=600",
            ),
            *("--monitor-interval", "0.2"),
            *training(self.arguments),
            *(
                "--disk",
                str(disk),
                "--cloud",
                str(self.folder / "cloud"),
                "--events",
                str(self.folder / "events.jsonl"),
            ),
            *(
                "--every",
                str(self.arguments.every),
                "--cloud-every",
                str(self.arguments.cloud_every),
                "--timeout",
                "60",
            ),
            *("--export", str(self.folder / "chaos.safetensors")),
        ]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        self.agents.append(Agent(name, process, disk))
        return name

    def kill(self, agent: Agent) -> None:
        """The machine is gone at once, and its disk."""
        ranks = agent.ranks()
        os.kill(agent.process.pid, signal.SIGKILL)
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        agent.process.wait()
        self.agents.remove(agent)
        shutil.rmtree(agent.disk, ignore_errors=True)

    def tell(self, agent: Agent) -> None:
        """The machine is told to leave, has its time, and is gone with its disk."""
        agent.process.send_signal(signal.SIGTERM)
        try:
            agent.process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            self.kill(agent)
            return
        self.agents.remove(agent)
        shutil.rmtree(agent.disk, ignore_errors=True)

    def events(self) -> list[dict[str, Any]]:
        """All lines of the job's log."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_join(self, since: int) -> list[dict[str, Any]]:
        """Until the job began again after the log's line ``since`` and finished three steps, or all; the lines from there on."""
        end = time.monotonic() + STEP_LIMIT_S
        while time.monotonic() < end:
            rows = self.events()[since:]
            joins = [place for place, row in enumerate(rows) if row["event"] == "join"]
            if any(row["event"] == "finish" for row in rows):
                return rows
            if joins and sum(row["event"] == "step" for row in rows[joins[-1] :]) >= 3:
                return rows
            time.sleep(0.1)
        texts = [f"{agent.name}: {(self.folder / f'{agent.name}.txt').read_text()[-3000:]}" for agent in self.agents]
        raise SystemExit(f"no three steps in {STEP_LIMIT_S:.0f} s\n" + "\n".join(texts))

    def finished(self) -> bool:
        """All steps are done."""
        return any(row["event"] == "finish" for row in self.events())


def training(arguments: argparse.Namespace) -> list[str]:
    return [
        str(EXAMPLES / "train_cluster.py"),
        *(
            "--eager",
            "--evenly",
            "--double",
            "--steps",
            str(10 * arguments.events + 20),
            "--pause",
            str(arguments.pause),
            "--batch",
            "12",
            "--layers",
            "4",
            "--width",
            "32",
            "--context",
            "16",
        ),
    ]


def changes(path: Path, nodes: int) -> list[int]:
    """Numbers of nodes after each change of a trace, scaled to at most ``nodes``."""
    counts = [count for _, count in json.loads(path.read_text())["points"]]
    most = max(counts)
    scaled = [max(1, round(count * nodes / most)) for count in counts]
    return [scaled[0], *(new for old, new in itertools.pairwise(scaled) if new != old)]


def main() -> None:
    arguments = parse_arguments()
    chance = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    counts = changes(Path(arguments.trace), arguments.nodes)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    market = Market(folder, arguments, store.port)
    print(json.dumps(environment()), flush=True)
    for _ in range(counts[0]):
        market.start()
    market.wait_for_join(0)
    recoveries, done = [], 0
    place = 1
    while done < arguments.events and not market.finished():
        target = counts[place % len(counts)]
        place += 1
        while len(market.agents) != target and done < arguments.events and not market.finished():
            done += 1
            recoveries.append(one_change(market, target, chance))
            print(json.dumps(recoveries[-1]), flush=True)
    for agent in list(market.agents):
        agent.process.wait(timeout=STEP_LIMIT_S)
    report = summary(market, recoveries, folder, arguments)
    print(json.dumps({key: value for key, value in report.items() if key != "recovery_s"}, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(folder)


def one_change(market: Market, target: int, chance: random.Random) -> dict[str, Any]:
    """Make one change towards so many nodes, and wait until training goes on."""
    since, start = len(market.events()), time.time()
    if len(market.agents) < target:
        kind, who = "join", market.start()
    else:
        agent = chance.choice(market.agents)
        kind, who = chance.choice(["kill", "kill", "tell"]), agent.name
        (market.kill if kind == "kill" else market.tell)(agent)
    rows = market.wait_for_join(since)
    joined = next((row for row in reversed(rows) if row["event"] == "join"), None)
    first = next((row for row in rows if joined and row["event"] == "step" and row["time_s"] > joined["time_s"]), None)
    return {
        "event": kind,
        "node": who,
        "nodes": len(market.agents),
        "recovery_s": first["time_s"] - start if first else None,
        "detect_and_restart_s": joined["time_s"] - joined["seconds"] - start if joined else None,
        "join_s": joined["seconds"] if joined else None,
        "restore_s": joined["restore_s"] if joined else None,
        "bytes": joined["bytes"] if joined else None,
        "step": joined["step"] if joined else None,
    }


def summary(
    market: Market, recoveries: list[dict[str, Any]], folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The numbers of the whole run."""
    from safetensors.torch import load_file

    rows = market.events()
    alone = folder / "alone"
    arguments.pause = 0.0
    command = [
        sys.executable,
        *training(arguments),
        "--disk",
        str(alone / "disk"),
        "--export",
        str(alone / "m.safetensors"),
    ]
    alone.mkdir()
    subprocess.run(command, check=True, capture_output=True, cwd=EXAMPLES, env={**os.environ, "OMP_NUM_THREADS": "2"})
    expected, found = load_file(alone / "m.safetensors"), load_file(folder / "chaos.safetensors")
    lost, reported, read, needed = 0, 0, 0, 0
    for row in rows:
        if row["event"] in ("save", "finish"):
            reported = max(reported, row["cloud"])
        elif row["event"] == "join":
            lost += max(0, reported - row["step"])
            read += row["bytes"]["cloud"]
            needed += row["missing_bytes"]
    return {
        "events": len(recoveries),
        "kinds": {kind: sum(row["event"] == kind for row in recoveries) for kind in ("kill", "tell", "join")},
        "steps": max(row["step"] for row in rows if row["event"] == "step") + 1,
        "steps_trained": sum(row["event"] == "step" for row in rows),
        "max_weight_difference": max(float((expected[name] - found[name]).abs().max()) for name in expected),
        "names_equal": set(expected) == set(found),
        "lost_saved_steps": lost,
        "cloud_bytes_read": read,
        "cloud_bytes_needed": needed,
        "recovery_s": recoveries,
        "seed": arguments.seed,
        "torch": torch.__version__,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="JSON with points of (seconds, count)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=30, help="changes to make")
    parser.add_argument("--nodes", type=int, default=4, help="at most")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds after each step")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--cloud-every", type=int, default=10)
    parser.add_argument("--json", help="file of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
