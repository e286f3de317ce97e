"""The keys of a graph's plan and of its code, and the compilation that the cache has under them.

In: a graph's key, and how much of the budget plans may not have. Out: keys for a compiler, and the `Compilation` of an earlier
process. Ranks that compile together have a stored one only if each of them has it.
"""

import hashlib
import secrets

from autohete_fx.cache import load_text, store_text
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.compiler.compilation import Compilation


class StoredPlan:
    """The plan that the cache has for a graph and its budget, looked up again whenever more of the budget is withheld.

    Args:
        graph_key: of the graph, its options and all else that decides.
        agreement: of the ranks that compile it together.

    Attributes:
        withheld_bytes: how much less than the budget plans may use.
        key: of the plan. Code compiled for another figure is other code.
        compilation: what is stored under it; None where nothing is.
    """

    def __init__(self, graph_key: str, agreement: Agreement) -> None:
        self._graph_key = graph_key
        self._agreement = agreement
        self._look_up(agreement.most("withheld bytes", int(load_text("withheld", graph_key) or 0)))

    def _look_up(self, withheld_bytes: int) -> None:
        self.withheld_bytes = withheld_bytes
        self.key = hashlib.sha256(f"{self._graph_key}/{withheld_bytes}".encode()).hexdigest()[:24]
        self._common_key, stored = self.key, load_text("compilation", self.key)
        if self._agreement.is_shared:
            self._common_key, stored = self._common_code(stored)
        self.compilation = None if stored is None else Compilation.from_json(stored)

    def _common_code(self, stored: str | None) -> tuple[str, str | None]:
        """The key of the code that ranks compile together, and what this one has stored of it, if all of them have.

        A rank whose caches have the code runs none of what the others would wait for it in. Each compilation of all ranks
        therefore has a key of its own, under which no rank finds code before. From then on all is decided, so that each rank may
        find the code or compile it again by itself.
        """
        found = self._agreement.common("cache", None if stored is None else load_text("code", self.key))
        if found is not None:
            return found, stored
        return self._agreement.first("key of code", lambda: f"{self.key}/{secrets.token_hex(8)}"), None

    @property
    def code_key(self) -> str:
        """The key of the code: one for all ranks that compile together, or where their code differs, one for each."""
        rank = self._agreement.rank_of_code
        return self._common_key if rank is None else f"{self._common_key}/{rank}"

    def withhold(self, num_bytes: int) -> None:
        """Plan with that much less than the budget, in later processes as well."""
        self._look_up(num_bytes)
        store_text("withheld", self._graph_key, str(num_bytes))

    def forget(self) -> None:
        """Have nothing stored: state of the process that the key does not have has made another graph.

        It gets a key of its own, for the code of each has to find its own plan.
        """
        self._graph_key = f"{self._graph_key}/{secrets.token_hex(8)}"
        self._look_up(self.withheld_bytes)

    def store(self, compilation: Compilation) -> None:
        """For later processes."""
        store_text("compilation", self.key, compilation.to_json())
        store_text("code", self.key, self._common_key)
