"""The second pass of an evaluation by a short way, for the objectives that most runs have: on a GPU and on the CPU."""
