"""Leases of large mappings: how much is mapped for them, and which free range they get."""

import ctypes
import mmap

import pytest

from autohete_fx.errors import HostMemoryError
from autohete_fx.runtime.tiers.arena import ALIGNMENT_BYTES as LINE
from autohete_fx.runtime.tiers.arena import Arena, Chunk

MIB = 2**20


def test_reserve_takes_smaller_pieces_where_a_large_one_is_refused() -> None:
    sizes: list[int] = []

    def stingy(num_bytes: int) -> Chunk:
        if num_bytes > 80 * MIB:
            raise HostMemoryError("too large")
        sizes.append(num_bytes)
        return Chunk(mmap.mmap(-1, num_bytes))

    arena = Arena(stingy, growth_bytes=MIB)
    arena.reserve(200 * MIB)
    assert arena.reserved_bytes == 200 * MIB and max(sizes) <= 80 * MIB
    lease = arena.lease(60 * MIB)
    assert arena.reserved_bytes == 200 * MIB and len(lease) == 60 * MIB
    little = Arena(lambda n: stingy(n if sum(sizes) < 250 * MIB else 2**40), growth_bytes=MIB)
    with pytest.raises(HostMemoryError, match=r"75\.0 MiB of 300\.0 MiB could be reserved: too large"):
        little.reserve(300 * MIB)
    assert little.reserved_bytes == 75 * MIB


def test_what_grows_beside_what_was_reserved_grows_by_its_own_size() -> None:
    arena = Arena(lambda n: Chunk(mmap.mmap(-1, n)), growth_bytes=MIB)
    arena.reserve(256 * MIB)
    leases = [arena.lease(256 * MIB), arena.lease(LINE)]
    assert arena.reserved_bytes == 257 * MIB, "an eighth more of what was counted exactly"
    leases += [arena.lease(MIB) for _ in range(64)]
    assert arena.reserved_bytes <= (257 + 64 * 1.25) * MIB


def test_free_ranges_are_joined_and_best_fitting() -> None:
    arena = Arena(lambda n: Chunk(mmap.mmap(-1, n)), growth_bytes=MIB)
    leases = {n: arena.lease(n) for n in (LINE, 10 * LINE, LINE + 1, 5 * LINE, LINE - 1)}
    addresses = {n: ctypes.addressof(lease) for n, lease in leases.items()}
    ten, five = addresses[10 * LINE], addresses[5 * LINE]
    del leases[10 * LINE], leases[5 * LINE]
    best = arena.lease(5 * LINE - 20)
    assert ctypes.addressof(best) == five  # and not the ten, nor the chunk's tail
    seven, three = arena.lease(7 * LINE - 48), arena.lease(3 * LINE)
    assert ctypes.addressof(seven) == ten and ctypes.addressof(three) == ten + 7 * LINE
    leases.clear()
    del best, seven, three
    assert ctypes.addressof(arena.lease(MIB)) == addresses[LINE] and arena.reserved_bytes == MIB
