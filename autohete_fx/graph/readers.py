"""The readers of a value, through views of it.

In: a node. Out: each node that reads its memory and makes something else of it, with the views that lead there.
"""

from torch import fx

from autohete_fx.graph import annotations
from autohete_fx.graph.collectives import ISSUING_COLLECTIVES, WAITS
from autohete_fx.graph.saved import is_view

Use = tuple[tuple[fx.Node, ...], fx.Node]
"""A reader, and the chain of views that leads to it."""


def readers_of(node: fx.Node, views: tuple[fx.Node, ...] = ()) -> list[Use]:
    """Each reader of a value. Copies that we inserted do not count, collectives do."""
    found: list[Use] = []
    for user in list(node.users):
        is_copy = annotations.inserted(user) is not None and user.target not in (*ISSUING_COLLECTIVES, *WAITS)
        if is_view(user) and not is_copy:
            found.extend(readers_of(user, (*views, user)))
        elif not is_copy:
            found.append((views, user))
    return found
