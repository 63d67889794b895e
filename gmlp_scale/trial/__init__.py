"""Training steps of a recipe on random rows, without shards and without a run folder: what they take and carry.

launch/doctor.py, launch/science.py, launch/plan.py --fake-ranks and benchmarks/ take them.
"""
