"""The configurations of Inductor and AOTAutograd."""

from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

__all__ = ["functorch_config", "inductor_config"]
