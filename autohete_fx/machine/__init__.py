"""The machine: rates that are measured or looked up, and budgets."""
