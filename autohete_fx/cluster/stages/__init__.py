"""A rank's stage of a model: built on its device, compiled, and run in a pipeline."""
