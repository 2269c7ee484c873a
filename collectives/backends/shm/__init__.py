"""Ranks of one node reduce straight from each other's memory: own segments, a board to meet at, data in tiles."""
