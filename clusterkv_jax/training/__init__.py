"""Training through a compressed cache: losses, rows as parameters, and runs that resume (extra `train`)."""
