"""Set-up, checks and programs that write pages; each runs by itself."""
