"""Attention over KV pages behind one narrow interface, one file per backend."""
