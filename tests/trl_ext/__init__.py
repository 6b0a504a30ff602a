"""TRL as a host of token weights. What imports TRL runs in processes of its own, see environment.py."""
