"""One experiment a file, each with `run(options)`."""
