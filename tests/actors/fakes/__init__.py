"""Actors that keep the supervisor's protocol and do nothing else; a module for each role."""
