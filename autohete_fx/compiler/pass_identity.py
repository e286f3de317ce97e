"""The identity of a user's pass, which tells the compiled code that it shaped from other compiled code.

In: a callable. Out: a string for the keys of our cache of plans, AOTAutograd's and Inductor's. It is equal in two processes
only where the callable says so itself, as Inductor's custom passes do. Were two different passes to share a key, the second
program would run the first one's code.
"""

import hashlib
import logging
import uuid
from collections.abc import Callable

from torch.utils.weak import WeakIdKeyDictionary

log = logging.getLogger(__name__)

_tokens = WeakIdKeyDictionary()  # of passes that say nothing, as long as they live


def pass_identity(user_pass: Callable[..., object]) -> str:
    """16 hex digits of what ``user_pass.uuid()`` returns and of its class.

    A pass without ``uuid()``, or for which that is None, has an identity of its own in this process. No other process finds its
    code in a cache, which a warning says once.
    """
    word = getattr(user_pass, "uuid", lambda: None)()
    kind = type(user_pass)
    return _token_of(user_pass) if word is None else _digest(f"{kind.__module__}.{kind.__qualname__}:{word!r}")


def _token_of(user_pass: Callable[..., object]) -> str:
    token = _tokens.get(user_pass)
    if token is None:
        token = _tokens[user_pass] = _digest(uuid.uuid4().hex)
        log.warning(
            "the pass %s has no uuid(): plans and code that it shapes are made again in each process. Give it a method uuid() that"
            " returns a string of all that it depends on, as for Inductor's custom passes, to have them cached",
            getattr(user_pass, "__qualname__", type(user_pass).__qualname__),
        )
    return token


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
