"""What launch/benchmark.py measures: the training step, the loader, checkpoints and the start, each beside its peers.

Only ratios within one run are worth quoting. So all contenders of a part take turns, round by round, and a figure is
the median over the rounds. Every part returns a dict that may hold
    ratios   more is better: `--compare` names those that fell
    costs    less is better: `--compare` names those that rose
and what a reader needs to judge them. Seconds are there to be read, not to be compared with another run's.

The part `scaling` has no peers: it counts and times what more ranks cost (scaling.py).

launch/gpu_proof.sh adds what is judged instead of timed: device_facts, trial, proof, and the proof_report of all of it.
"""
