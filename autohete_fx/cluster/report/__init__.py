"""Plans as text, JSON and charts, and the history of a job as text and as a page."""
