"""How plans are found: shapes of pipelines, how many of each, where they stand, and planners to compare with."""
