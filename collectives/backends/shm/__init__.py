"""Ranks of one node read each other's arrays in memory that they share."""
