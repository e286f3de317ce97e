"""A step of a plan, replayed event by event: what judges plans, and imports nothing that finds them."""
