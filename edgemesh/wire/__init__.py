"""What travels between actors: ids, messages, the table of who may send what, and the codec."""
