"""Ring and all-to-all exchanges of checked messages over non-blocking MPI calls."""
