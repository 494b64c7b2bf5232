"""``sync="auto"``: the fastest exact strategy, found during training."""
