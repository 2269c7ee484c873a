"""How a communicator runs its calls: one queue, progress during every wait, comparison before data moves, shutdown."""
