"""Planning from measurements: what a collective costs, fitted and predicted with its error."""
