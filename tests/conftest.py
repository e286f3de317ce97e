"""What every test shares: one instruction set, caches of this run's own, and a clean compiler before each test.

* oneDNN is pinned to one instruction set before torch is imported, so that bitwise comparisons mean the same on
  every machine.
* The Inductor cache directory belongs to this run. Compiled C++ kernels, named by their source, are shared by all its
  tests and processes, for speed. Cached *graphs* have the test in their key: a test meets another test's compilation never,
  and sees caching as a user does (both caches on).
* ``AUTOHETE_CACHE_DIR`` (machine figures, profiles) is shared by all tests too, but for those with the fixtures ``fresh_cache``
  and ``fresh_plans``.
* Tests with the marker ``thorough`` run where ``-m`` asks for them, as ``make test-all`` does with ``-m ""``. They are ``slow``.
* Tests under ``tests/cuda`` have the marker ``cuda`` and are skipped where there is no CUDA device.
* pytest-xdist's workers (``-n``) share the cores: each computes on its part of them. A file's tests run in one worker, which
  makes what they share once; all CUDA tests run in one, too.
"""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.held_updates import Gate

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")  # debug information: a tenth of the C++ compiler's time
if _workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _workers)))
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of another process, which has made the directories
_RUN_DIR = (
    Path(os.environ["AUTOHETE_CACHE_DIR"]).parent if _IS_WORKER else Path(tempfile.mkdtemp(prefix="autohete-tests-"))
)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_RUN_DIR / "inductor")
os.environ["AUTOHETE_CACHE_DIR"] = str(_RUN_DIR / "autohete")
assert "torch" not in sys.modules, "torch was imported before its environment was set"

pytest.register_assert_rewrite("tests.main_job", "tests.placed_job", "tests.training")

_ORDER = ("unit", "graph", "e2e", "dist", "cuda")
_LONGEST = (
    "shard_job",
    "tensor_parallel",
    "cluster_job",
    "chaos",
    "shard_plans",
    "shard_uses",
    "shard_agreement",
    "tensor_parallel_job",
    "shard_replicas",
    "test_shard",
    "shard_exact",
    "shard_replicated",
    "cluster_doctor",
    "cluster_store",
    "cluster_split",
    "automatic",
    "shard_states",
    "fsdp",
    "cluster_hung",
)


def pytest_unconfigure() -> None:
    if not _IS_WORKER:
        shutil.rmtree(_RUN_DIR, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast directories first, and of ranks the longest files first, so that workers end together; the marker ``cuda`` on all of
    tests/cuda, and ``slow`` on what is ``thorough``."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(here).parts[0]
        length = next((at for at, name in enumerate(_LONGEST) if item.path.stem.endswith(name)), len(_LONGEST))
        return _ORDER.index(folder) if folder in _ORDER else len(_ORDER), length if folder == "dist" else 0

    items.sort(key=place)
    for item in items:
        if item.path.is_relative_to(here / "cuda"):
            item.add_marker(pytest.mark.cuda)
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files in the order above, whatever ``--dist`` says."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/cuda" if nodeid.startswith("tests/cuda/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """What imports have made stays: collecting garbage, as many tests do, need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _clean_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """No compiled code, cached graph, random state or pending update of an earlier test. Tests without torch do not pay for it."""
    if request.node.get_closest_marker("keeps_compiled"):
        yield
        return
    os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] = request.node.nodeid  # of processes that the test starts
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch.compiler.config"].cache_key_tag = request.node.nodeid
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    yield
    if request.path.parent.name in ("e2e", "cuda"):
        import torch._dynamo

        from autohete_fx.runtime.pending.fence import lower_fences

        lower_fences()  # of a model that the traceback of a failed test keeps alive
        torch._dynamo.reset()
        gc.collect()
        gc.freeze()  # as above: what is left stays, such as what this test was the first to import


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, plain training with Inductor differs from itself: they add to an embedding's gradient in any order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Gate]":
    """Holds updates while it is closed, and with them the copies that wait for them."""
    from tests.held_updates import Gate, use_lanes

    gate = Gate()
    use_lanes(monkeypatch, pace=gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of ours for one test, in its environment and that of its subprocesses. Inductor's has no graph of another test
    anyway."""
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def fresh_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `fresh_cache`, but with the figures of the machine, which take two seconds to measure."""
    from tests.training import warm_up

    warm_up("cpu")
    (tmp_path / "machine").mkdir()
    for figures in (_RUN_DIR / "autohete" / "machine").glob("*.json"):
        shutil.copy(figures, tmp_path / "machine")
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def caches(fresh_plans: Path) -> Path:
    """For ``--caches`` of a benchmark: C++ kernels that other tests have compiled, and the figures of the machine."""
    caches, kernels = fresh_plans / "caches", Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    shutil.copytree(fresh_plans / "machine", caches / "autohete" / "machine")
    kernels.mkdir(exist_ok=True)
    (caches / "torchinductor").symlink_to(kernels)
    return caches
