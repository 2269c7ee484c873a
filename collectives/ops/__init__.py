"""The collectives, each described once as steps over a transport."""
