"""Costs of layers and links, timed on the devices of a running job."""
