"""Learning-rate schedules, under PyTorch's names."""
