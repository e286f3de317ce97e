"""Graphs that carry decisions: our operators, the annotations of nodes, what a backward pass reads of its forward."""
