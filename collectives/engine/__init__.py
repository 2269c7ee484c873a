"""How a communicator runs its calls: one queue, progress on every wait, verification before data moves, shutdown."""
