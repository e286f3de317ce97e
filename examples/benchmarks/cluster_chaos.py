"""Train through a spot market: nodes vanish, are told to leave, and join, by a recorded trace of availability and by seed.

Every node is a torchrun agent with one rank of ``train_cluster.py`` and a disk of its own, on this machine. After each change of
the trace, scaled down in count, a node is killed (SIGKILL, its disk is lost), told to leave (SIGTERM), or started, once training
has gone on for a few steps since the change before. With ``--together``, nodes by which the trace falls at once are killed at one
moment. The store of the rendezvous is this process's, as on a machine that stays.

At the end the weights are compared with those of a run that nobody disturbed, and the JSON file has:

    events                  changes that were made
    steps                   of the whole job
    max_weight_difference   from the undisturbed run, fp64
    lost_saved_steps        steps that were reported as saved in the cloud and trained again
    cloud_bytes_read, cloud_bytes_needed   that restores read there, and that no surviving disk had
    recovery_s              by event: from the change to the next finished step, and its parts; with what processes then use
    leaks                   processes, and temporary files of nodes that ended by themselves, left at the end; and what was used in
                            the last third of the events over that in the first

    python examples/benchmarks/cluster_chaos.py --trace examples/benchmarks/measured/availability.json --seed 1 --json chaos.json
"""

import argparse
import contextlib
import itertools
import json
import math
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
        slack = self.arguments.slack
        meeting = f"last_call_timeout={4 * slack},keep_alive_interval={slack},keep_alive_max_attempt=3"
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", f"1:{self.arguments.nodes}", "--nproc-per-node", "1", "--max-restarts", "1000"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "chaos"),
            *("--rdzv-conf", f"is_host=0,{meeting},join_timeout=600"),
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
                str(self.arguments.timeout),
            ),
            *("--export", str(self.folder / "chaos.safetensors")),
        ]
        temporary = self.folder / f"{name}-tmp"
        temporary.mkdir()
        env = {
            **os.environ,
            "TMPDIR": str(temporary),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        self.agents.append(Agent(name, process, disk))
        return name

    def kill(self, *agents: Agent) -> None:
        """The machines are gone at once, and their disks."""
        for pid in [pid for agent in agents for pid in (agent.process.pid, *agent.ranks())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.process.wait()
            self.agents.remove(agent)
            for folder in (agent.disk, self.folder / f"{agent.name}-tmp"):
                shutil.rmtree(folder, ignore_errors=True)

    def tell(self, agent: Agent) -> None:
        """The machine is told to leave, has its time, and is gone with its disk."""
        agent.process.send_signal(signal.SIGTERM)
        try:
            agent.process.wait(timeout=self.arguments.timeout)
        except subprocess.TimeoutExpired:
            self.kill(agent)
            return
        self.agents.remove(agent)
        shutil.rmtree(agent.disk, ignore_errors=True)

    def use(self) -> dict[str, int]:
        """What the run uses now: processes, their memory and open files, and files of saves."""
        agents = [agent.process.pid for agent in self.agents]
        ranks = [rank for agent in self.agents for rank in agent.ranks()]
        places = [*(agent.disk for agent in self.agents), self.folder / "cloud"]
        return {
            "processes": len(agents) + len(ranks),
            "agent_rss_bytes": max(map(rss_bytes, agents), default=0),
            "rank_rss_bytes": max(map(rss_bytes, ranks), default=0),
            "own_rss_bytes": rss_bytes(os.getpid()),
            "open_files": max((open_files(pid) for pid in (*agents, *ranks)), default=0),
            "saved_files": sum(len(dirs) + len(files) for place in places for _, dirs, files in os.walk(place)),
        }

    def events(self) -> list[dict[str, Any]]:
        """All lines of the job's log. The last one may be on its way."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_join(self, since: int) -> list[dict[str, Any]]:
        """Until the job began again after the log's line ``since`` and finished three steps, or all; the lines from there on."""
        end = time.monotonic() + self.arguments.patience
        while time.monotonic() < end:
            rows = self.events()[since:]
            joins = [place for place, row in enumerate(rows) if row["event"] == "join"]
            if self.ends(rows):
                return rows
            if joins and sum(row["event"] == "step" for row in rows[joins[-1] :]) >= 3:
                return rows
            time.sleep(0.1)
        texts = [f"{agent.name}: {(self.folder / f'{agent.name}.txt').read_text()[-3000:]}" for agent in self.agents]
        raise SystemExit(f"no three steps in {self.arguments.patience:.0f} s\n" + "\n".join(texts))

    def finished(self) -> bool:
        """All steps are done."""
        return self.ends(self.events())

    def ends(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the job ends in these lines. Ranks that torchrun begins again all at one moment finish too, with fewer steps."""
        return any(row["event"] == "finish" and row["step"] >= self.arguments.steps for row in rows)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def open_files(pid: int) -> int:
    """Files that a process has open; 0 if it is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def growth(recoveries: list[dict[str, Any]]) -> dict[str, float]:
    """How much more of each thing was used in the last third of the events than in the first: the ratio of means, for numbers of
    nodes that both had."""
    third = max(1, len(recoveries) // 3)
    first, last = recoveries[:third], recoveries[-third:]
    found = {}
    for key in recoveries[0]["use"]:
        both = {row["nodes"] for row in first} & {row["nodes"] for row in last}
        ends = [[row["use"][key] for row in rows if row["nodes"] in both] for rows in (first, last)]
        if all(ends) and sum(ends[0]):
            found[key] = sum(ends[1]) / len(ends[1]) / (sum(ends[0]) / len(ends[0]))
    return found


def training(arguments: argparse.Namespace) -> list[str]:
    """The script of the job, with what does not change between nodes."""
    model = "--eager --evenly --double --batch 12 --layers 4 --width 32 --context 16".split()
    return [
        str(EXAMPLES / "train_cluster.py"),
        *model,
        *("--steps", str(arguments.steps), "--pause", str(arguments.pause)),
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
    began = time.monotonic()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    market = Market(folder, arguments, store.port)
    print(json.dumps(environment()), flush=True)
    try:
        recoveries = disturbed(market, counts, chance)
    finally:
        market.kill(*(agent for agent in market.agents if agent.process.poll() is None))
    left = {
        "processes": len(processes_of(folder)),
        "files": [str(path.relative_to(folder)) for path in folder.glob("*-tmp/**/*") if path.is_file()],
    }
    report = {
        **summary(market, recoveries, folder, arguments),
        "seconds": time.monotonic() - began,
        "leaks": {**left, "growth": growth(recoveries)},
    }
    print(json.dumps({key: value for key, value in report.items() if key != "recovery_s"}, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(folder)


def disturbed(market: Market, counts: list[int], chance: random.Random) -> list[dict[str, Any]]:
    """Train on nodes that come and go as these numbers say, until the job has finished; what each change took."""
    arguments, began = market.arguments, time.monotonic()
    for _ in range(counts[0]):
        market.start()
    market.wait_for_join(0)
    recoveries, place = list[dict[str, Any]](), 1
    while len(recoveries) < arguments.events and not market.finished() and time.monotonic() - began < arguments.seconds:
        target = counts[place % len(counts)]
        place += 1
        while len(market.agents) != target and len(recoveries) < arguments.events and not market.finished():
            recoveries.append(one_change(market, target, chance, together=arguments.together))
            print(json.dumps(recoveries[-1]), flush=True)
    for agent in list(market.agents):
        agent.process.wait(timeout=arguments.patience)
    return recoveries


def one_change(market: Market, target: int, chance: random.Random, *, together: bool) -> dict[str, Any]:
    """Make one change towards so many nodes, and wait until training goes on."""
    since, start = len(market.events()), time.time()
    if len(market.agents) < target:
        kind, who = "join", market.start()
    elif together and len(market.agents) > target + 1:
        agents = chance.sample(market.agents, len(market.agents) - target)
        kind, who = "kill", " ".join(agent.name for agent in agents)
        market.kill(*agents)
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
        "use": market.use(),
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
    parser.add_argument("--steps", type=int, help="of the job; else 20, and 10 more for each change")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no change is made any more")
    parser.add_argument("--nodes", type=int, default=4, help="at most")
    parser.add_argument("--together", action="store_true", help="kill all nodes of a fall at one moment")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds after each step")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--cloud-every", type=int, default=10)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds in which training must go on")
    parser.add_argument(
        "--slack", type=int, default=1, help="times as long until agents are missed, on a machine that is busy"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent rank is an error")
    parser.add_argument("--json", help="file of the results")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or 10 * arguments.events + 20
    return arguments


if __name__ == "__main__":
    main()
