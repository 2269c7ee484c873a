"""What moves arrays between ranks; each backend is a `Transport`."""
