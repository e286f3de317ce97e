"""The bound that no decisions can beat: the integer program and its relaxation."""
