"""What the machine has: rates that are measured or looked up, and budgets."""
