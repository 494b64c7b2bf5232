"""The algorithms: pure functions from a number of ranks to rounds."""
