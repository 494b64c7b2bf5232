"""Starvation benchmark: real ranks with unequal numbers of batches, under torch and under Paceline."""
