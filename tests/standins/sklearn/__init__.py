"""Stands for scikit-learn in the jobs that tests start: its digits, without the second that its import takes."""
