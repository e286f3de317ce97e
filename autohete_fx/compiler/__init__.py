"""From a graph of Dynamo's to code that runs within a budget: captured, planned, rewritten and compiled, one graph a time."""
