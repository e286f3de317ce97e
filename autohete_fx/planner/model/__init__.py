"""The costs of decisions: figures of blocks, memory and lanes of a step, and the simulator that judges them."""
