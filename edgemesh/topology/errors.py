"""The one error that everything about a topology file raises."""


class TopologyError(ValueError):
    """A topology that cannot be served; the message is one paragraph that names the remedy."""
