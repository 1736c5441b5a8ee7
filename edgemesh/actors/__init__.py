"""One file per kind of process: what it takes in, what the pure packages decide about it, what it sends."""
