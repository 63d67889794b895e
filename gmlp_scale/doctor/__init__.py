"""What launch/doctor.py checks before a long run, on the ranks and places of the run itself."""
