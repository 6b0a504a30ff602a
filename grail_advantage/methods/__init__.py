"""The methods, a family a file."""
