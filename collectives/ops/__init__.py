"""The collectives: each one described once, as steps over a transport."""
