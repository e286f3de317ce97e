"""The colour of everything that is drawn, as the name of a CSS class; one meaning has one colour on the whole page."""

from autohete_fx.ir import Activations, Optimizer, Params
from autohete_fx.report.data import HELD

OF_WORK = {
    "forward": "blue",
    "backward": "violet",
    "recompute": "amber",
    "between": "faint",
    "fetch": "teal",
    "prefetch": "teal",
    "reload": "orange",
    "offload": "orange",
    "gradients": "pink",
    "update": "green",
    "upload": "lime",
    "download": "lime",
    "states": "cyan",
    "disk": "brown",
    "gather": "teal",
    "reduce": "pink",
    "average": "red",
}
"""By the label of a planned event or a measured record."""

OF_MEMORY = {
    "parameters": "blue",
    "fetched parameters": "teal",
    "gathered parameters": "teal",
    "optimizer states": "green",
    "streamed optimizer states": "cyan",
    "activations": "orange",
    "workspace": "amber",
    "workspace of updates": "amber",
    "gradients": "pink",
    "gradients on their way to the host": "red",
    "gradients of streamed states": "lime",
    "gradients of a later micro-batch": "violet",
    "whole gradients": "brown",
    "inputs, buffers and other graphs": "grey",
}
"""By the name of what the planner counts, from the bottom of the picture up."""

OF_ACTIVATIONS = dict(zip(Activations, ("faint", "amber", "orange", "lime", "violet", "pink"), strict=False))
OF_PARAMS = {Params.DEVICE: "faint", Params.HOST: "teal"}
OF_OPTIMIZER = {
    Optimizer.DEVICE: "faint",
    Optimizer.HOST: "green",
    Optimizer.STREAMED: "cyan",
    Optimizer.DISK: "brown",
}


def of_work(label: str) -> str:
    """The class of a bar. Waits are hatched; labels that nobody has named are grey."""
    return "held" if label.startswith(HELD) else OF_WORK.get(label, "grey")
