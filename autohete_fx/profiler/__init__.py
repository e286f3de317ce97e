"""The costs of blocks: the default partition of a joint graph and a `Machine` enter, a `Profile` leaves.

``profile_analytic`` tells seconds from FLOPs and bytes, ``profile_measured`` times the distinct blocks on the
device; both take a `Partition` and count bytes by liveness. ``trace_step`` tells the peak of any pair of graphs,
rewritten ones included, and ``dry_run`` that of the code compiled from them.
"""

from autohete_fx.profiler.analytic import profile_analytic
from autohete_fx.profiler.measured import profile_measured
from autohete_fx.profiler.memory.dry_run import CompiledCode, dry_run
from autohete_fx.profiler.memory.liveness import MemoryTrace, StepTrace, trace_memory, trace_step
from autohete_fx.profiler.partition import ParamInfo, Partition

__all__ = [
    "CompiledCode",
    "MemoryTrace",
    "ParamInfo",
    "Partition",
    "StepTrace",
    "dry_run",
    "profile_analytic",
    "profile_measured",
    "trace_memory",
    "trace_step",
]
