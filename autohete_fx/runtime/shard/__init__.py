"""Parameters that ranks hold together: the surface, its kernels, checkpoints, and what a step needs of other ranks."""

from autohete_fx.runtime.shard import kernels  # noqa: F401  (registers the ops' kernels)
from autohete_fx.runtime.shard.surface import shard
from autohete_fx.runtime.shard.whole import gathered

__all__ = ["gathered", "shard"]
