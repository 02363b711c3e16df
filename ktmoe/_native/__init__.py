"""Native code: the driver (core) and one thin module per instruction set."""
