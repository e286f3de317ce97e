"""What names a graph in every process and on every rank."""

import torch
from torch import fx, nn

from autohete_fx.capture.inputs import graph_inputs
from autohete_fx.compiler.keys import graph_digest
from autohete_fx.options import Options


def digests(length: int, first: int) -> tuple[str, str]:
    """With sizes and without, of a graph that was traced for a batch of ``first`` rows after another trace took symbols."""
    found: list[tuple[str, str]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        inputs = graph_inputs(gm, example_inputs)
        options = Options.from_user()
        found.append((graph_digest(gm, inputs, options), graph_digest(gm, inputs, options, with_sizes=False)))
        return gm.forward

    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    torch.compile(model, backend=backend, dynamic=True)(torch.ones(first, length, 8))
    return found[0]


def test_ranks_whose_batches_have_other_lengths_name_a_graph_alike():
    """Code refers to the name, and ranks find each other's in caches that they share."""
    (here, named), (there, also_named), (again, _) = digests(6, 4), digests(10, 5), digests(6, 4)
    assert named == also_named and here != there and here == again
