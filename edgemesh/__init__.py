"""EdgeMesh: LLM serving on boxes of consumer GPUs without NVLink."""

__version__ = "0.1.0"
