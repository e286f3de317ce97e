"""Where homes are: arenas of pinned memory, mapped files, and how much RAM there is."""
