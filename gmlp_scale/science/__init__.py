"""Tests the paper's claims on small models with several seeds: which runs, in which order, and what they show."""
