"""Launch scripts and the shortest programs; each runs by itself."""
