"""The memory of graphs: kernels as Inductor would make them, their liveness and scratch, and a dry run of compiled code."""
