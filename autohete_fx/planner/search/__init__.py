"""How decisions are found: starts, annealing over replays, and rounding of what the relaxation says."""
