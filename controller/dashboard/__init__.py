"""Pages, templates and static files: reads what the API reads, decides nothing."""
