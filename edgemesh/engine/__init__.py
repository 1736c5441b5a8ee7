"""The only torch of the mesh: network, attention, collectives, sampler, weights and the memory they lie in."""
