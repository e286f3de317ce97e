"""Commands about clusters: `autohete plan --cluster` and `autohete doctor --cluster`."""
