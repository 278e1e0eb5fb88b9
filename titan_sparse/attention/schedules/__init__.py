"""In which order keys and values meet the queries: one file a schedule."""
